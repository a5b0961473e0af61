"""The row norm kernel, and LayerNorm alone, against their plain versions."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import norm, row_norm
from rose.kernels.jit import norm as jit_norm
from rose.kernels.jit import row_norm as jit


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (255, 8), (513, 6)])
def test_row_norm(rows, parts, device, close, poisoned):
    torch.manual_seed(rows)
    values = torch.randn(rows, parts, 8, device=device) * 3 + 0.5
    sums = torch.stack([values.sum(2), values.square().sum(2)])
    actual, expected = poisoned(2, rows + 3, dtype=torch.float32), torch.empty(2, rows)
    jit.row_norm(sums, parts * 8, 1e-5, *actual[:, :rows])
    row_norm.row_norm(sums.cpu(), parts * 8, 1e-5, *expected)
    close(actual[:, :rows].cpu(), expected)
    flat = values.cpu().double().flatten(1)
    normed = torch.nn.functional.layer_norm(flat, flat.shape[1:], eps=1e-5)
    close((flat * expected[0][:, None] + expected[1][:, None]).float(), normed.float())
    assert actual[:, rows:].isnan().all()


def test_a_row_of_equal_values_has_no_negative_variance(device):
    value = torch.tensor(2.7182817)
    sums = torch.stack([value * 1024, (value * value * 1024).nextafter(torch.tensor(0.0))]).view(2, 1, 1)
    mean, square = sums.flatten() / 1024
    assert square - mean * mean < 0
    for module, place in ((row_norm, "cpu"), (jit, device)):
        scale, offset = torch.empty(2, 1, device=place)
        module.row_norm(sums.to(place), 1024, 1e-12, scale, offset)
        torch.testing.assert_close(scale.cpu(), torch.tensor([1e6]))
        torch.testing.assert_close(offset.cpu(), torch.tensor([-2.7182817e6]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_in_place(dtype, device, close):
    torch.manual_seed(1)
    x, weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in ((7, 96), (96,), (96,)))
    plain = norm.LayerNorm(weight.cpu(), bias.cpu(), 1e-5)
    expected = torch.nn.functional.layer_norm(
        x.cpu().float(), (96,), plain.weight.float(), plain.bias.float()
    )
    kept = x.cpu().clone()
    jit_norm.layer_norm(x[:5], norm.LayerNorm(weight, bias, 1e-5), x[:5])
    close(x[:5].cpu(), expected[:5].to(dtype))
    assert torch.equal(x[5:].cpu(), kept[5:])
    norm.layer_norm(kept, plain, kept)
    close(kept, expected.to(dtype))
