"""From hidden states to one f32 vector a sequence (and its int8), without atomics: same input, same bits.

The `norm_*` forms take what the last layer leaves (a residual stream and what is still to be added to it), so
that the final RMSNorm costs neither a launch nor a pass over memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from rose.kernels import dispatch
from rose.kernels.norm import RmsNorm, added, rms_normalized
from rose.kernels.quantize import tanh_int8

if TYPE_CHECKING:
    from torch import Tensor

    from rose.device_batch import Outputs

# Of each sequence's rows; "only": there is one row a sequence, as one_query_attention leaves them.
Which = Literal["first", "last", "only"]

# Rows of fp32 scratch = programs that sum parts of sequences; 512 of 4 warps fill an H200 (132 processors).
SCRATCH_ROWS = 512


@dataclass(frozen=True, slots=True)
class LastHidden:
    """What the last layer leaves: x [T, H] or [K, T, H] to add to residual [T, H], and the final norm.

    x: None: there is nothing more to add.
    """

    x: Tensor | None
    residual: Tensor
    norm: RmsNorm


def pool_scratch(hidden_size: int, device: torch.device | str) -> Tensor:
    """f32[512, H]: what `mean_pool` and `norm_mean_pool` need beside their outputs."""
    return torch.zeros(SCRATCH_ROWS, hidden_size, dtype=torch.float32, device=device)


def mean_pool(hidden: Tensor, bounds: Tensor, outputs: Outputs, scratch: Tensor) -> None:
    """Mean over each sequence's rows of hidden [T, H], summed in fp32; zeros for an empty sequence.

    bounds: offsets of sequences, i32[S+1]; or i32[2, S], contiguous, starts over ends of any runs of rows.
    outputs: vectors f32[S, H], int8 i8[S, H] or None. scratch: from `pool_scratch`.
    """
    if dispatch.uses_triton(hidden):
        from rose.kernels.jit import pooling as jit

        jit.mean_pool(hidden, bounds, outputs, scratch)
    else:
        _means(hidden.float(), bounds, outputs)


def norm_mean_pool(last: LastHidden, bounds: Tensor, outputs: Outputs, scratch: Tensor) -> None:
    """As `mean_pool` of the final norm of residual + x."""
    if dispatch.uses_triton(last.residual):
        from rose.kernels.jit import pooling as jit

        jit.norm_mean_pool(last, bounds, outputs, scratch)
    else:
        _means(rms_normalized(added(last.x, last.residual), last.norm), bounds, outputs)


def gather_rows(hidden: Tensor, cu_seqlens: Tensor, which: Which, outputs: Outputs) -> None:
    """The first or last row of each sequence of hidden [T, H], or its only one; zeros for an empty sequence.

    cu_seqlens: i32[S+1]. outputs: vectors [S, H] of any float dtype, int8 i8[S, H] or None.
    """
    if dispatch.uses_triton(hidden):
        from rose.kernels.jit import pooling as jit

        jit.gather_rows(hidden, cu_seqlens, which, outputs)
    else:
        rows, empty = which_rows(cu_seqlens, which)
        _finish(hidden[rows].float().masked_fill(empty, 0.0), outputs)


def norm_gather_rows(last: LastHidden, cu_seqlens: Tensor, which: Which, outputs: Outputs) -> None:
    """As `gather_rows` of the final norm of residual + x, computed for those rows only."""
    if dispatch.uses_triton(last.residual):
        from rose.kernels.jit import pooling as jit

        jit.norm_gather_rows(last, cu_seqlens, which, outputs)
        return
    rows, empty = which_rows(cu_seqlens, which)
    total = rms_normalized(
        added(None if last.x is None else last.x[..., rows, :], last.residual[rows]), last.norm
    )
    _finish(total.masked_fill(empty, 0.0), outputs)


def which_rows(cu_seqlens: Tensor, which: Which) -> tuple[Tensor, Tensor]:
    """Row indices i64[S] (0 for empty sequences), and which sequences are empty: bool[S, 1]."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    empty = ends <= starts
    only = torch.arange(len(starts), device=starts.device)
    rows = {"first": starts, "last": ends - 1, "only": only}[which]
    return rows.masked_fill(empty, 0), empty.unsqueeze(1)


def _means(hidden: Tensor, bounds: Tensor, outputs: Outputs) -> None:
    """One reduction a sequence: index_add_ would sum row after row and lose digits over long sequences."""
    starts, ends = (bounds[:-1], bounds[1:]) if bounds.dim() == 1 else bounds.unbind()
    lengths = ends - starts
    sums = torch.stack(
        [hidden[start:end].sum(0) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    )
    _finish(sums / lengths.clamp(min=1).unsqueeze(1), outputs)


def _finish(vectors: Tensor, outputs: Outputs) -> None:
    outputs.vectors.copy_(vectors)
    if outputs.int8 is not None:
        tanh_int8(vectors, outputs.int8)
