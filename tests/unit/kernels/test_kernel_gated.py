"""The gated GELU kernel against PyTorch's, in both forms."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import gated
from rose.kernels.jit import gated as jit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_tanh", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (3, 1024), (2, 1536)])
def test_gelu_mul(shape, by_tanh, dtype, device, close, poisoned):
    tokens, width = shape
    gate_up = torch.randn(tokens, 2 * width, device=device).mul(3).to(dtype)
    gate, up = gate_up.float().split(width, dim=1)
    approximate = "tanh" if by_tanh else "none"
    expected = (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(dtype)
    out = poisoned(*shape, dtype=dtype)
    jit.gelu_mul(gate_up, out, by_tanh)
    close(out, expected)
    plain = torch.empty(shape, dtype=dtype)
    gated.gelu_mul(gate_up.cpu(), plain, by_tanh)
    close(plain, expected.cpu())
