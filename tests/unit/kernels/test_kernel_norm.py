"""Norm kernels against their plain versions."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import norm
from rose.kernels.jit import norm as jit

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64), (3, 384), (2, 1000), (5, 1024)]


def _rms(hidden: int, dtype: torch.dtype, device: str) -> norm.RmsNorm:
    return norm.RmsNorm(1 + 0.1 * torch.randn(hidden, device=device).to(dtype), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype, device, close, poisoned):
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    rms = _rms(shape[1], dtype, device)
    actual, expected = poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype).cpu()
    jit.rms_norm(x, rms, actual)
    norm.rms_norm(x.cpu(), norm.RmsNorm(rms.weight.cpu(), rms.eps), expected)
    close(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape, splits, dtype, device, close, poisoned):
    x = torch.randn((splits, *shape) if splits else shape, device=device).to(dtype)
    residual = torch.randn(shape, device=device).to(dtype)
    rms = _rms(shape[1], dtype, device)
    kept, out = residual.clone(), poisoned(*shape, dtype=dtype)
    jit.add_rms_norm(x, kept, rms, out)

    total = residual.float() + (x.float().sum(0) if splits else x.float())
    expected = torch.nn.functional.rms_norm(total, shape[1:], rms.weight.float(), rms.eps)
    close(kept, total.to(dtype))
    close(out, expected.to(dtype))

    plain_residual, plain = residual.cpu().clone(), torch.empty(shape, dtype=dtype)
    norm.add_rms_norm(x.cpu(), plain_residual, norm.RmsNorm(rms.weight.cpu(), rms.eps), plain)
    close(plain_residual, total.to(dtype).cpu())
    close(plain, expected.to(dtype).cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_left_to_add(shape, dtype, device, close, poisoned):
    """What a product has added to the residual stream by itself is normed as it is there."""
    residual = (torch.randn(shape, device=device) + 3).to(dtype)
    rms, bias = _rms(shape[1], dtype, device), torch.randn(shape[1], device=device).to(dtype)
    layer = norm.LayerNorm(rms.weight, bias.flip(0), 1e-12)
    total = residual.float() + bias.float()
    expected = (
        torch.nn.functional.rms_norm(residual.float(), shape[1:], rms.weight.float(), rms.eps),
        torch.nn.functional.layer_norm(total, shape[1:], layer.weight.float(), layer.bias.float(), 1e-12),
    )
    for module in (jit, norm) if device == "cpu" else (jit,):
        kept, outs = residual.clone(), [poisoned(*shape, dtype=dtype) for _ in range(2)]
        module.add_rms_norm(None, kept, rms, outs[0])
        module.add_layer_norm(None, kept, bias, layer, outs[1])
        assert torch.equal(kept, residual)
        for out, right in zip(outs, expected, strict=True):
            close(out, right.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("splits", [None, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_layer_norm(shape, splits, biased, dtype, device, close, poisoned):
    hidden = shape[1]
    x = torch.randn((splits, *shape) if splits else shape, device=device).to(dtype)
    # A large common offset: variance by E[x²] - E[x]² would lose its digits here.
    residual = (torch.randn(shape, device=device) + 30).to(dtype)
    bias = torch.randn(hidden, device=device).to(dtype) if biased else None
    weight, ln_bias = (torch.randn(hidden, device=device).to(dtype) for _ in range(2))
    out = poisoned(*shape, dtype=dtype)
    jit.add_layer_norm(x, residual, bias, norm.LayerNorm(weight, ln_bias, 1e-12), out)

    total = residual.float() + (x.float().sum(0) if splits else x.float())
    total = total if bias is None else total + bias.float()
    expected = torch.nn.functional.layer_norm(total, (hidden,), weight.float(), ln_bias.float(), 1e-12)
    close(out, expected.to(dtype))

    plain = norm.LayerNorm(weight.cpu(), ln_bias.cpu(), 1e-12)
    reference = residual.cpu().clone()
    norm.add_layer_norm(x.cpu(), reference, None if bias is None else bias.cpu(), plain, reference)
    close(reference, expected.to(dtype).cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_pre_layer_norm(shape, biased, dtype, device, close, poisoned):
    hidden = shape[1]
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(hidden, device=device).to(dtype) if biased else None
    weight, ln_bias = (torch.randn(hidden, device=device).to(dtype) for _ in range(2))
    total = x.float() + residual.float() + (bias.float() if biased else 0.0)
    expected = torch.nn.functional.layer_norm(total, (hidden,), weight.float(), ln_bias.float(), 1e-5)

    kept, plain = residual.cpu().clone(), poisoned(*shape, dtype=dtype).cpu()
    layer = norm.LayerNorm(weight.cpu(), ln_bias.cpu(), 1e-5)
    norm.add_pre_layer_norm(x.cpu(), kept, bias.cpu() if biased else None, layer, plain)
    close(kept, total.to(dtype).cpu())
    close(plain, expected.to(dtype).cpu())

    out = poisoned(*shape, dtype=dtype)
    jit.add_pre_layer_norm(x, residual, bias, norm.LayerNorm(weight, ln_bias, 1e-5), out)
    close(residual, total.to(dtype))
    close(out, expected.to(dtype))


def test_add_layer_norm_may_write_over_its_residual(device, close):
    x, residual = torch.randn(4, 96, device=device), torch.randn(4, 96, device=device)
    layer = norm.LayerNorm(torch.ones(96, device=device), torch.zeros(96, device=device), 1e-5)
    expected = torch.nn.functional.layer_norm(x + residual, (96,), eps=1e-5)
    jit.add_layer_norm(x, residual, None, layer, residual)
    close(residual, expected)


@pytest.mark.parametrize("rows", [2, 4])
def test_several_rows_a_program(rows, device, close, poisoned, monkeypatch):
    """Of which the last program's may be past the end."""
    monkeypatch.setattr(jit, "rows_a_program", lambda programs: rows)
    x, residual = torch.randn(2, 5, 72, device=device), torch.randn(6, 72, device=device)
    ones, zeros = torch.ones(72, device=device), torch.zeros(72, device=device)
    expected, out = residual[:5] + x.sum(0), poisoned(6, 72, dtype=torch.float32)
    jit.add_layer_norm(x, residual[:5], None, norm.LayerNorm(ones, zeros, 1e-5), out[:5])
    close(out[:5], torch.nn.functional.layer_norm(expected, (72,), eps=1e-5))
    assert out[5].isnan().all()
    kept = residual.clone()
    jit.add_rms_norm(x, kept[:5], norm.RmsNorm(ones, 1e-6), out[:5])
    close(kept[:5], expected)
    close(out[:5], torch.nn.functional.rms_norm(expected, (72,), eps=1e-6))
    assert out[5].isnan().all() and torch.equal(kept[5], residual[5])
