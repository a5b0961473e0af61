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
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_gelu(shape, biased, dtype, device, close):
    x = torch.randn(shape, device=device).mul(3).to(dtype)
    bias = torch.randn(shape[1], device=device).to(dtype) if biased else None
    total = x.float() if bias is None else x.float() + bias.float()
    expected = torch.nn.functional.gelu(total).to(dtype)
    plain = x.cpu().clone()
    jit.bias_gelu(x, bias, x)
    close(x, expected)
    activation.bias_gelu(plain, None if bias is None else bias.cpu(), plain)
    close(plain, expected.cpu())
