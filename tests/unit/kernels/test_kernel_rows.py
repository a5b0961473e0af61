"""Copies that leave the padding behind."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import rows
from rose.kernels.jit import rows as jit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "shape"), [(1, (1, 8)), (7, (3, 24)), (9, (1536,)), (70, (2, 20))])
def test_copy_real_rows(tokens, shape, dtype, device, poisoned):
    source = torch.randn(tokens, *shape, device=device).to(dtype)
    for real in {0, 1, tokens // 2, tokens}:
        source[real:] = float("nan")
        cu_seqlens = torch.tensor([0, real // 3, real, real], dtype=torch.int32, device=device)
        expected = torch.cat([source[:real], torch.zeros_like(source[real:])])
        out = poisoned(tokens, *shape, dtype=dtype)
        jit.copy_real_rows(source, cu_seqlens, out)
        assert torch.equal(out, expected)
        plain = torch.full(source.shape, 7.0, dtype=dtype)
        rows.copy_real_rows(source.cpu(), cu_seqlens.cpu(), plain)
        assert torch.equal(plain, expected.cpu())
        source = torch.randn(tokens, *shape, device=device).to(dtype)
