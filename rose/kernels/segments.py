"""The poolings that few models have, by torch's own kernels: the maximum, and a mean that weighs by position.

Unlike those of pooling.py they allocate, f32[T, H] each; in a CUDA graph that comes from the graph's pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels.embedding import write_positions
from rose.kernels.quantize import tanh_int8

if TYPE_CHECKING:
    from torch import Tensor

    from rose.device_batch import Outputs


def max_pool(hidden: Tensor, cu_seqlens: Tensor, outputs: Outputs) -> None:
    """Of each sequence of hidden [T, H], the largest value in each column; zeros for an empty sequence.

    cu_seqlens: i32[S+1]; rows past its end are left out. outputs: vectors f32[S, H], int8 i8[S, H] or None.
    """
    _finish(_reduce(hidden.float(), cu_seqlens, "max"), cu_seqlens, outputs)


def weighted_mean_pool(hidden: Tensor, cu_seqlens: Tensor, outputs: Outputs) -> None:
    """As `max_pool`, but the mean in which the token at place i counts i + 1 times.

    Source: Muennighoff, SGPT, arXiv 2202.08904.
    """
    weights = torch.empty(len(hidden), dtype=torch.int32, device=hidden.device)
    write_positions(cu_seqlens, weights)
    lengths = cu_seqlens.diff().clamp(min=1).float()
    total = _reduce(hidden.float() * (weights + 1).unsqueeze(1), cu_seqlens, "sum")
    _finish(total / (0.5 * lengths * (lengths + 1)).unsqueeze(1), cu_seqlens, outputs)


def _reduce(rows: Tensor, cu_seqlens: Tensor, how: str) -> Tensor:
    """f32[S, H]; unsafe: the check of the offsets would wait for the device."""
    return torch.segment_reduce(rows, how, offsets=cu_seqlens.long(), axis=0, unsafe=True)


def _finish(vectors: Tensor, cu_seqlens: Tensor, outputs: Outputs) -> None:
    outputs.vectors.copy_(vectors.masked_fill((cu_seqlens.diff() <= 0).unsqueeze(1), 0.0))
    if outputs.int8 is not None:
        tanh_int8(outputs.vectors, outputs.int8)
