"""Attention of one query a sequence by its input's rows; see rose.kernels.absorbed for why that is the same.

Queries go through the projections of queries and keys; each tile of tokens scores its rows by them and adds
the rows up by weight; sequences add their tiles up; the sums go through the projection of values. A tile lies
in one sequence: sequence s has its tiles from start // TOKENS + s on, so that no two sequences share a place
and both a program and a sequence find theirs from the offsets alone.
"""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from rose.kernels.absorbed import MIN_TILE, scratch_elements
from rose.kernels.jit.compile import block_of, ceil_div, device_function, kernel, launch, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.absorbed import AbsorbedHeads
    from rose.kernels.one_query import OneQuery, PickedRows

# Below any score: tiles that are not there must add nothing rather than NaN.
_LOWEST = tl.constexpr(-1e30)
# From so many tokens on there are programs enough for an H200's 132 processors with larger tiles.
_MANY_TOKENS = 8192
# Programs that absorb queries, if few: more would each read the projection of queries once more.
_FEW_PROGRAMS = 64
# Bytes of a row that are multiplied at once, and tiles that are added at once.
_CHUNK_BYTES, _TILES = 256, 16


@device_function
def _products(
    x_ptr, x_at, mask, y_ptr, y_at, HIDDEN: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr
):
    """f32[M, N] of rows at x_at [M] and y_at [N], HIDDEN wide; rows of x that mask leaves out are zeros."""
    cols = tl.arange(0, CHUNK)
    total = tl.zeros([x_at.shape[0], y_at.shape[0]], tl.float32)
    for first in tl.range(0, HIDDEN, CHUNK, num_stages=STAGES):
        x = tl.load(x_ptr + x_at[:, None] + (first + cols)[None, :], mask=mask[:, None], other=0.0)
        y = tl.load(y_ptr + y_at[:, None] + (first + cols)[None, :])
        total = tl.dot(x, y.T, total, input_precision="ieee")
    return total


@device_function
def _bounds(cu_seqlens_ptr, sequences, inside):
    start = tl.load(cu_seqlens_ptr + sequences, mask=inside, other=0)
    stop = tl.load(cu_seqlens_ptr + sequences + 1, mask=inside, other=0)
    return start, stop


@kernel("cu_seqlens_ptr", "num_seqs")
def _absorb_queries(
    hidden_ptr,
    cu_seqlens_ptr,
    query_ptr,
    bias_ptr,
    key_ptr,
    absorbed_ptr,
    picked_ptr,
    num_seqs,
    scale_log2,
    LAST: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head, part, parts = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    sequences = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = sequences < num_seqs
    # The offsets were there before this forward's first kernel: they need not wait for the one before.
    start, stop = _bounds(cu_seqlens_ptr, sequences, inside)
    wait_for_inputs(PDL)
    live = start < stop
    row_at = (stop - 1 if LAST else start).to(tl.int64) * HIDDEN
    features, cols = head * HEAD_DIM + tl.arange(0, HEAD_DIM), tl.arange(0, CHUNK)
    q = _products(hidden_ptr, row_at, live, query_ptr, features * HIDDEN, HIDDEN, CHUNK, STAGES)
    q = (q + tl.load(bias_ptr + features).to(tl.float32)[None, :]) * scale_log2
    q = q.to(hidden_ptr.dtype.element_ty)
    out_at = (sequences.to(tl.int64) * HEADS + head) * HIDDEN
    for first in tl.range(part * CHUNK, HIDDEN, parts * CHUNK, num_stages=STAGES):
        key = tl.load(key_ptr + (features * HIDDEN)[:, None] + (first + cols)[None, :])
        absorbed = tl.dot(q, key, input_precision="ieee").to(q.dtype)
        tl.store(absorbed_ptr + out_at[:, None] + (first + cols)[None, :], absorbed, mask=inside[:, None])
    if head == 0:
        picked_at = sequences.to(tl.int64) * HIDDEN
        for first in range(part * CHUNK, HIDDEN, parts * CHUNK):
            x = tl.load(hidden_ptr + row_at[:, None] + (first + cols)[None, :], mask=live[:, None], other=0.0)
            tl.store(picked_ptr + picked_at[:, None] + (first + cols)[None, :], x, mask=inside[:, None])


@kernel("cu_seqlens_ptr", "num_seqs")
def _attend_tiles(
    hidden_ptr,
    cu_seqlens_ptr,
    absorbed_ptr,
    sums_ptr,
    softmax_ptr,
    num_seqs,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    OFFSETS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, sequence = tl.program_id(0), -1
    for first in range(0, num_seqs, OFFSETS):
        index = first + tl.arange(0, OFFSETS)
        place = tl.load(cu_seqlens_ptr + index, mask=index < num_seqs, other=0) // TOKENS + index
        sequence += tl.sum(((place <= tile) & (index < num_seqs)).to(tl.int32), axis=0)
    start, stop = tl.load(cu_seqlens_ptr + sequence), tl.load(cu_seqlens_ptr + sequence + 1)
    wait_for_inputs(PDL)
    near = start + (tile - start // TOKENS - sequence) * TOKENS
    if near >= stop:
        return
    rows, heads, cols = near + tl.arange(0, TOKENS), tl.arange(0, BLOCK_HEADS), tl.arange(0, CHUNK)
    inside, row_at = rows < stop, rows.to(tl.int64) * HIDDEN
    # Where heads are no power of two, the last one is scored again, and not stored.
    head_at = (tl.cast(sequence, tl.int64) * HEADS + tl.minimum(heads, HEADS - 1)) * HIDDEN
    scores = _products(hidden_ptr, row_at, inside, absorbed_ptr, head_at, HIDDEN, CHUNK, STAGES)
    scores = tl.where(inside[:, None], scores, -float("inf"))
    largest = tl.max(scores, axis=0)
    weights = tl.exp2(scores - largest[None, :]).to(hidden_ptr.dtype.element_ty)
    own, head_at = heads < HEADS, tile.to(tl.int64) * HEADS + heads
    tl.store(softmax_ptr + 2 * head_at, largest, mask=own)
    tl.store(softmax_ptr + 2 * head_at + 1, tl.sum(weights.to(tl.float32), axis=0), mask=own)
    for first in tl.range(0, HIDDEN, CHUNK, num_stages=STAGES):
        x = tl.load(hidden_ptr + row_at[:, None] + (first + cols)[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(weights.T, x, input_precision="ieee")
        tl.store(sums_ptr + (head_at * HIDDEN)[:, None] + (first + cols)[None, :], total, mask=own[:, None])


@kernel("cu_seqlens_ptr")
def _add_tiles(
    sums_ptr,
    softmax_ptr,
    cu_seqlens_ptr,
    means_ptr,
    HEADS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    sequence, head = at // HEADS, at % HEADS
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    start, stop = tl.load(cu_seqlens_ptr + sequence), tl.load(cu_seqlens_ptr + sequence + 1)
    wait_for_inputs(PDL)
    count, near = tl.cdiv(stop - start, TOKENS), start // TOKENS + sequence
    largest, weight = tl.full([1], _LOWEST, tl.float32), tl.zeros([1], tl.float32)
    total = tl.zeros([COLS], tl.float32)
    for first in range(0, count, TILES):
        tiles = first + tl.arange(0, TILES)
        mask, tile_at = tiles < count, (near + tiles) * HEADS + head
        most = tl.load(softmax_ptr + 2 * tile_at, mask=mask, other=_LOWEST)
        weights = tl.load(softmax_ptr + 2 * tile_at + 1, mask=mask, other=0.0)
        sums = tl.load(sums_ptr + (tile_at * HIDDEN)[:, None] + cols[None, :], mask=mask[:, None], other=0.0)
        larger = tl.maximum(largest, tl.max(most, axis=0))
        shrink, share = tl.exp2(largest - larger), tl.exp2(most - larger)
        weight = weight * shrink + tl.sum(weights * share, axis=0)
        total = total * shrink + tl.sum(sums * share[:, None], axis=0)
        largest = larger
    mean = total / tl.where(start < stop, weight, 1.0)
    tl.store(means_ptr + at * HIDDEN + cols, mean.to(means_ptr.dtype.element_ty))


@kernel("cu_seqlens_ptr", "num_seqs")
def _project_values(
    means_ptr,
    cu_seqlens_ptr,
    value_ptr,
    bias_ptr,
    out_ptr,
    num_seqs,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    features = tl.program_id(0) * COLS + tl.arange(0, COLS)
    head = tl.program_id(0) * COLS // HEAD_DIM
    sequences = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = sequences < num_seqs
    start, stop = _bounds(cu_seqlens_ptr, sequences, inside)
    wait_for_inputs(PDL)
    mean_at = (sequences.to(tl.int64) * HEADS + head) * HIDDEN
    context = _products(means_ptr, mean_at, inside, value_ptr, features * HIDDEN, HIDDEN, CHUNK, STAGES)
    context += tl.load(bias_ptr + features).to(tl.float32)[None, :]
    context = tl.where((start < stop)[:, None], context, 0.0).to(out_ptr.dtype.element_ty)
    out_at = sequences.to(tl.int64) * (HEADS * HEAD_DIM)
    tl.store(out_ptr + out_at[:, None] + features[None, :], context, mask=inside[:, None])


@dataclass(frozen=True, slots=True)
class AbsorbedPlan:
    """tokens: a tile's. rows: sequences whose queries a program takes. cols: features of values it makes.

    offsets: that a program looks through at once. tile_warps, stages: as in Triton.
    """

    tokens: int
    rows: int
    cols: int
    offsets: int
    tile_warps: int = 4
    stages: int = 4


def plan_for(hidden: Tensor, head_dim: int) -> AbsorbedPlan:
    """By tokens alone: what is compiled ahead for one sequence is all that is launched for more.

    Products in fp32 are no tensor core's, and larger ones would not fit into registers.
    """
    if len(hidden) < _MANY_TOKENS or hidden.dtype is torch.float32:
        return AbsorbedPlan(tokens=MIN_TILE, rows=16, cols=16, offsets=256)
    return AbsorbedPlan(tokens=2 * MIN_TILE, rows=64, cols=head_dim, offsets=1024, tile_warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """rows: [S, heads, H], absorbed queries, then means. sums: f32[tiles, heads, H]. softmax: f32[.., 2]."""

    rows: Tensor
    sums: Tensor
    softmax: Tensor

    @classmethod
    def of(cls, scratch: Tensor, num_tokens: int, num_seqs: int, heads: AbsorbedHeads) -> _Scratch:
        wanted = scratch_elements(num_tokens, num_seqs, heads)
        if scratch.numel() < wanted:
            raise ValueError(f"{scratch.numel()} elements of scratch; {wanted} are needed")
        num_rows, size = num_seqs * heads.num_heads, len(heads.query)
        rows, rest = scratch.view(-1)[:wanted].tensor_split([num_rows * size])
        num_sums = (num_tokens // MIN_TILE + num_seqs) * heads.num_heads * size
        sums, softmax = rest.view(torch.float32).tensor_split([num_sums])
        return cls(rows, sums, softmax)


def absorbed_attention(
    hidden: Tensor,
    cu_seqlens: Tensor,
    heads: AbsorbedHeads,
    query: OneQuery,
    out: PickedRows,
    plan: AbsorbedPlan | None = None,
) -> None:
    """See rose.kernels.absorbed.absorbed_attention. plan: in place of `plan_for`'s, of no smaller tiles.

    Raises:
        ValueError: the scratch has less than `scratch_elements`.
    """
    num_tokens, size = hidden.shape
    num_seqs, num_heads = len(cu_seqlens) - 1, heads.num_heads
    plan = plan or plan_for(hidden, heads.head_dim)
    scratch = _Scratch.of(out.scratch, num_tokens, num_seqs, heads)
    chunk = _chunk(size, _CHUNK_BYTES // hidden.element_size())
    blocks = ceil_div(num_seqs, plan.rows)
    parts = min(max(_FEW_PROGRAMS // (num_heads * blocks), 1), size // chunk)
    shape = {"HEADS": num_heads, "HIDDEN": size}
    chunks = {"CHUNK": chunk, "STAGES": plan.stages}
    launch(
        _absorb_queries, (num_heads, blocks, parts),
        hidden, cu_seqlens, heads.query, heads.query_bias, heads.key, scratch.rows, out.hidden, num_seqs,
        query.scale / math.log(2), LAST=query.which == "last", HEAD_DIM=heads.head_dim, ROWS=plan.rows,
        num_warps=4, **shape, **chunks,
    )  # fmt: skip
    launch(
        _attend_tiles, (num_tokens // plan.tokens + num_seqs,),
        hidden, cu_seqlens, scratch.rows, scratch.sums, scratch.softmax, num_seqs,
        BLOCK_HEADS=max(block_of(num_heads), 16), TOKENS=plan.tokens, OFFSETS=plan.offsets,
        num_warps=plan.tile_warps, **shape, **chunks,
    )  # fmt: skip
    cols = _chunk(size, 256)
    launch(
        _add_tiles, (num_seqs * num_heads, size // cols),
        scratch.sums, scratch.softmax, cu_seqlens, scratch.rows,
        TOKENS=plan.tokens, TILES=_TILES, COLS=cols, num_warps=4, **shape,
    )  # fmt: skip
    launch(
        _project_values, (size // plan.cols, blocks),
        scratch.rows, cu_seqlens, heads.value, heads.value_bias, out.context, num_seqs,
        HEAD_DIM=heads.head_dim, ROWS=plan.rows, COLS=plan.cols, num_warps=4, **shape, **chunks,
    )  # fmt: skip


def _chunk(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)
