"""The division of an RMSNorm that was left to the next product, as a factor a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch

if TYPE_CHECKING:
    from torch import Tensor


def row_scale(sums: Tensor, width: int, eps: float, out: Tensor) -> None:
    """out f32[T] = 1 / sqrt(the row's sum / width + eps). sums: f32[T, parts], of squares."""
    if dispatch.uses_triton(sums):
        from rose.kernels.jit import row_scale as jit

        jit.row_scale(sums, width, eps, out)
    else:
        out.copy_(torch.rsqrt(sums.sum(1) / width + eps))
