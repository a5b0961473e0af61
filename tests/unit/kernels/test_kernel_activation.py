"""Activation kernels against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import activation
from rose.kernels.jit import activation as jit

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 40), (3, 1024), (2, 1536)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(shape, splits, dtype, device, close, poisoned):
    tokens, width = shape
    gate_up = torch.randn((splits or 1, tokens, 2 * width), device=device).mul(3).to(dtype)
    gate_up = gate_up if splits else gate_up[0]
    out = poisoned(*shape, dtype=dtype)
    jit.silu_mul(gate_up, out)
    gate, up = (gate_up.float().sum(0) if splits else gate_up.float()).split(width, dim=1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    close(out, expected)
    plain = torch.empty(shape, dtype=dtype)
    activation.silu_mul(gate_up.cpu(), plain)
    close(plain, expected.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_gelu(shape, biased, splits, dtype, device, close, poisoned):
    x = torch.randn((splits or 1, *shape), device=device).mul(3).to(dtype)
    x = x if splits else x[0]
    bias = torch.randn(shape[1], device=device).to(dtype) if biased else None
    total = x.float().sum(0) if splits else x.float()
    total = total if bias is None else total + bias.float()
    expected = torch.nn.functional.gelu(total).to(dtype)
    out, plain = poisoned(*shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    jit.bias_gelu(x, bias, out)
    close(out, expected)
    activation.bias_gelu(x.cpu(), None if bias is None else bias.cpu(), plain)
    close(plain, expected.cpu())
    if splits is None:
        jit.bias_gelu(x, bias, x)
        assert torch.equal(x, out)


def test_gelu_keeps_its_digits_everywhere(device):
    """Against fp64: 3e-7 of a result around 1, and as small as the tail itself far out on the left."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, 1e4, 0.0])]).to(device)
    out = torch.empty_like(x).view(1, -1)
    jit.bias_gelu(x.view(1, -1), None, out)
    exact = torch.nn.functional.gelu(x.double())
    assert ((out[0].double() - exact).abs() <= 4e-7 * exact.abs().clamp(min=1.0)).all()


@pytest.mark.parametrize("rows", [2, 4])
def test_several_rows_a_program(rows, device, close, poisoned, monkeypatch):
    """Of which the last program's may be past the end."""
    monkeypatch.setattr(jit, "rows_a_program", lambda programs: rows)
    x, out = torch.randn(5, 80, device=device), poisoned(5, 40, dtype=torch.float32)
    jit.silu_mul(x, out)
    gate, up = x.split(40, dim=1)
    close(out, torch.nn.functional.silu(gate) * up)
    out = poisoned(6, 80, dtype=torch.float32)
    jit.bias_gelu(x, None, out[:5])
    close(out[:5], torch.nn.functional.gelu(x))
    assert out[5].isnan().all()
