"""Attention of one query a sequence: all that a pooling of single rows needs of the last layer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from rose.kernels import dispatch
from rose.kernels.pooling import which_rows
from rose.runs import equal_runs

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.pooling import Which

# Programs that share the keys of sequences: two of 4 warps for each of an H200's 132 processors are enough.
SCRATCH_ROWS = 256
# Behind the values of a program its largest score and its sum; two more keep rows at multiples of 16 bytes.
SCRATCH_TAIL = 4


@dataclass(frozen=True, slots=True)
class OneQuery:
    """Which query of each sequence, and what it sees.

    which: "first" or "last". scale: factor on q·k.
    causal: whether the first query sees only itself; the last one sees its whole sequence anyway.
    """

    which: Which
    scale: float
    causal: bool = False

    @property
    def alone(self) -> bool:
        """Whether the query sees no key but its own."""
        return self.causal and self.which == "first"


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Where rows go: context [S, Hq D] and hidden [S, H], contiguous.

    scratch: from `one_query_scratch`, or what absorbed_attention wants.
    """

    context: Tensor
    hidden: Tensor
    scratch: Tensor


def one_query_scratch(head_dim: int, device: torch.device | str) -> Tensor:
    """f32[256, D + 4]: parts of sequences that programs write and others add up; no rows on a CPU."""
    rows = 0 if torch.device(device).type == "cpu" else SCRATCH_ROWS
    return torch.zeros(rows, head_dim + SCRATCH_TAIL, dtype=torch.float32, device=device)


def one_query_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    hidden: Tensor,
    cu_seqlens: Tensor,
    query: OneQuery,
    out: PickedRows,
) -> None:
    """out.context = softmax(q kᵀ · scale) v of one query a sequence, in fp32; out.hidden = its row of hidden.

    Zeros for an empty sequence. No row of one sequence is read for another, and none past cu_seqlens[-1].
    qkv: [T, Hq, D] and twice [T, Hk, D]; heads and D contiguous, rows may be strided. hidden: [T, H],
    contiguous. cu_seqlens: i32[S+1]. out: apart from all that is read.
    """
    if dispatch.uses_triton(hidden):
        from rose.kernels.jit import one_query as jit

        jit.one_query_attention(qkv, hidden, cu_seqlens, query, out)
        return
    rows, empty = which_rows(cu_seqlens, query.which)
    q, k, v = qkv
    if query.alone:
        attended = v[rows].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    elif hidden.is_cuda:
        attended = _by_segments((q[rows], k, v), cu_seqlens, query.scale)
    else:
        attended = _by_runs((q[rows], k, v), cu_seqlens, query.scale)
    out.context.copy_(attended.flatten(1).masked_fill(empty, 0.0))
    out.hidden.copy_(hidden[rows].masked_fill(empty, 0.0))


def _by_runs(qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, scale: float) -> Tensor:
    """[S, Hq, D] of q [S, Hq, D]: equally long neighbours in one call. Reads the offsets on the host."""
    q, k, v = qkv
    out = torch.zeros_like(q)
    offsets = cu_seqlens.tolist()
    first = 0
    for start, count, length in equal_runs(offsets):
        while offsets[first] == offsets[first + 1]:
            first += 1
        keys, values = (
            x[start : start + count * length].view(count, length, *x.shape[1:]).transpose(1, 2)
            for x in (k, v)
        )
        queries = q[first : first + count].unsqueeze(2)
        grouped = q.shape[1] != k.shape[1]
        mixed = scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=grouped)
        out[first : first + count] = mixed.squeeze(2)
        first += count
    return out


def _by_segments(qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, scale: float) -> Tensor:
    """The same, f32, with the offsets left on the device: may be captured. Allocates f32[T, Hq, D]."""
    q, k, v = qkv
    offsets, group = cu_seqlens.long(), q.shape[1] // k.shape[1]

    def reduced(rows: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(rows, how, offsets=offsets, axis=0, unsafe=True)

    tokens = torch.arange(len(k), dtype=cu_seqlens.dtype, device=k.device)
    owner = torch.searchsorted(cu_seqlens[1:], tokens, right=True).clamp_(max=len(q) - 1)
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q[owner] * keys).sum(-1) * scale
    weights = (scores - reduced(scores, "max")[owner]).exp_()
    mixed = reduced((weights.unsqueeze(-1) * values).flatten(1), "sum").view(q.shape)
    return mixed / reduced(weights, "sum").unsqueeze(-1)
