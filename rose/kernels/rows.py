"""Rows of sequences without those of the padding behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch

if TYPE_CHECKING:
    from torch import Tensor


def copy_real_rows(source: Tensor, cu_seqlens: Tensor, out: Tensor) -> None:
    """out [T, ...] = source [T, ...]; its rows past cu_seqlens[-1] become zeros, whatever source holds there.

    Both contiguous. cu_seqlens: i32[S+1]. For results of kernels that write no padded rows into memory of
    their own: what is left there may be a NaN, which reaches real rows through 0 * NaN, as FlashAttention
    multiplies masked weights by whatever rows of v follow a sequence.
    """
    if dispatch.uses_triton(out):
        from rose.kernels.jit import rows as jit

        jit.copy_real_rows(source, cu_seqlens, out)
    else:
        real = torch.arange(len(source), device=source.device) < cu_seqlens[-1]
        out.copy_(source.where(real.view(-1, *[1] * (source.dim() - 1)), source.new_zeros(())))
