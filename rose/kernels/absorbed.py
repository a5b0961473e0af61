"""Attention of one query a sequence straight from the layer's input: keys and values are never made.

A query's score of a row x is q·(W_k x) = (W_kᵀ q)·x, and its mean of values is W_v applied to its mean of
rows, because weights of a softmax add up to 1. So the projections of keys and values go to the few queries;
the bias of keys adds the same to all of a query's scores, which softmax does not see. Only where nothing
stands between the projection of a key and its product with the query: no rotation, no norm.
Source: DeepSeek-V2, arXiv 2405.04434, 2.1.2, where it is called absorption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch
from rose.kernels.pooling import which_rows
from rose.runs import equal_runs

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.one_query import OneQuery, PickedRows

# Four launches in the place of a product and two: not worth it for fewer tokens (BGE-M3 on an H200: 1024 take
# 8 us more, 1536 take 15 less).
MIN_TOKENS = 1536
# Tokens a sequence, on average, from which on it is done; it also bounds what scratch the sequences take.
MIN_LENGTH = 32
# Wider heads' tiles would not fit into the shared memory of every GPU.
MAX_HEAD_DIM = 64
# Tokens whose rows a program adds up; the room for partial sums depends on it.
MIN_TILE = 64


@dataclass(frozen=True, slots=True)
class AbsorbedHeads:
    """Projections of a layer's queries, keys and values, [H, H] each, contiguous. num_heads * D = H.

    Biases: [H]. That of keys plays no part.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor
    value_bias: Tensor
    num_heads: int

    @property
    def head_dim(self) -> int:
        """D."""
        return len(self.query) // self.num_heads


def scratch_elements(num_tokens: int, num_seqs: int, heads: AbsorbedHeads) -> int:
    """Elements of the heads' dtype that the GPU's kernels need: rows of sequences, and fp32 sums of tiles."""
    rows = num_seqs * heads.num_heads * len(heads.query)
    tiles = (num_tokens // MIN_TILE + num_seqs) * heads.num_heads * (len(heads.query) + 2)
    return rows + tiles * 4 // heads.query.element_size()


def absorbs(hidden: Tensor, num_seqs: int, heads: AbsorbedHeads, scratch: Tensor | None) -> bool:
    """Whether `absorbed_attention` of `num_seqs` sequences in hidden [T, H] beats making keys and values.

    The GPU's kernels want scratch, and widths that tensor cores take. Without Triton there is no version that
    could be captured.
    """
    num_tokens = len(hidden)
    if num_tokens < num_seqs * MIN_LENGTH:
        return False
    if not dispatch.uses_triton(hidden):
        return not hidden.is_cuda
    dim = heads.head_dim
    fits = 16 <= dim <= MAX_HEAD_DIM and dim & (dim - 1) == 0  # and so H is a multiple of 16
    room = 0 if scratch is None else scratch.numel()
    return fits and num_tokens >= MIN_TOKENS and room >= scratch_elements(num_tokens, num_seqs, heads)


def absorbed_attention(
    hidden: Tensor, cu_seqlens: Tensor, heads: AbsorbedHeads, query: OneQuery, out: PickedRows
) -> None:
    """As one_query_attention of the heads' projections of hidden [T, H], contiguous, with the same promises.

    cu_seqlens: i32[S+1]. query: one that sees its whole sequence. out.scratch: on a GPU, of hidden's dtype,
    contiguous, with `scratch_elements`; apart from all else, as the rest of out.

    Raises:
        ValueError: the query sees no key but its own.
    """
    if query.alone:
        raise ValueError("absorption is for queries that see their whole sequence")
    if dispatch.uses_triton(hidden):
        from rose.kernels.jit import absorbed as jit

        jit.absorbed_attention(hidden, cu_seqlens, heads, query, out)
        return
    rows, empty = which_rows(cu_seqlens, query.which)
    picked = hidden[rows]
    out.hidden.copy_(picked.masked_fill(empty, 0.0))
    by_head = (heads.num_heads, heads.head_dim, hidden.shape[1])
    q = torch.addmm(heads.query_bias, picked, heads.query.t()).mul_(query.scale)
    q = q.view(-1, *by_head[:2]).transpose(0, 1)
    means = _means(torch.bmm(q, heads.key.view(by_head)).transpose(0, 1), hidden, cu_seqlens)
    context = torch.bmm(means.transpose(0, 1), heads.value.view(by_head).transpose(1, 2))
    context = context.transpose(0, 1).flatten(1) + heads.value_bias
    out.context.copy_(context.masked_fill_(empty, 0.0))


def _means(queries: Tensor, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Of rows of hidden, by softmax of queries [S, heads, H]: as many. Reads the offsets on the host."""
    means = torch.zeros(queries.shape, dtype=queries.dtype)
    offsets = cu_seqlens.tolist()
    first = 0
    for start, count, length in equal_runs(offsets):
        while offsets[first] == offsets[first + 1]:
            first += 1
        x = hidden[start : start + count * length].view(count, length, -1)
        weights = torch.bmm(queries[first : first + count], x.transpose(1, 2)).softmax(-1)
        torch.bmm(weights, x, out=means[first : first + count])
        first += count
    return means
