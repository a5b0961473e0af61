"""One program a token: find its place among the offsets, gather its rows, norm.

An id or type that is out of range reads row 0: nobody has looked at them when they get here.
"""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import block_of, device_function, kernel, launch, wait_for_inputs, warps_for
from rose.kernels.jit.norm import layer_scaled, rms_scaled

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.embedding import BertTables, EmbeddedTokens
    from rose.kernels.norm import RmsNorm

# Offsets read at once; a step with more sequences loops.
SCAN = 256


@device_function
def position_of(cu_seqlens_ptr, num_seqs, token, SCAN: tl.constexpr):
    """Place of `token` in its sequence: its distance to the largest offset not past it; 0 past the last one.

    A vector load and a maximum beat a binary search, whose eight loads would wait for each other.
    """
    start = 0
    base = 0
    while base <= num_seqs:
        at = base + tl.arange(0, SCAN)
        offsets = tl.load(cu_seqlens_ptr + at, mask=at <= num_seqs, other=0)
        start = tl.maximum(start, tl.max(tl.where(offsets <= token, offsets, 0), axis=0))
        base += SCAN
    total = tl.load(cu_seqlens_ptr + num_seqs)
    return tl.where(token < total, token - start, 0)


@device_function
def row_of(ids_ptr, token, limit):
    """The row of a table with `limit` of them that a token reads, i64."""
    row = tl.load(ids_ptr + token).to(tl.int64)
    return tl.where((row >= 0) & (row < limit), row, 0)


@kernel("input_ids_ptr", "cu_seqlens_ptr", "positions_ptr", "num_seqs", "vocab_size")
def _embed_tokens(
    input_ids_ptr,
    cu_seqlens_ptr,
    table_ptr,
    weight_ptr,
    residual_ptr,
    hidden_ptr,
    positions_ptr,
    num_seqs,
    vocab_size,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    row = row_of(input_ids_ptr, token, vocab_size)
    embedded = tl.load(table_ptr + row * HIDDEN + cols, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * HIDDEN + cols
    tl.store(residual_ptr + at, embedded.to(residual_ptr.dtype.element_ty), mask=mask)
    normed = rms_scaled(embedded.to(tl.float32), eps, HIDDEN) * weight
    tl.store(hidden_ptr + at, normed.to(hidden_ptr.dtype.element_ty), mask=mask)
    tl.store(positions_ptr + token, position_of(cu_seqlens_ptr, num_seqs, token, SCAN))


@kernel(
    "input_ids_ptr", "cu_seqlens_ptr", "types_ptr", "num_seqs", "vocab_size", "num_types", "position_offset"
)
def _embed_bert(
    input_ids_ptr,
    cu_seqlens_ptr,
    types_ptr,
    word_ptr,
    position_ptr,
    type_table_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_seqs,
    vocab_size,
    num_types,
    position_offset,
    eps,
    HAS_POSITIONS: tl.constexpr,
    HAS_TYPES: tl.constexpr,
    HAS_TYPE_TABLE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    row = row_of(input_ids_ptr, token, vocab_size)
    total = tl.load(word_ptr + row * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_POSITIONS:
        place = position_of(cu_seqlens_ptr, num_seqs, token, SCAN) + position_offset
        total += tl.load(position_ptr + place * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_TYPE_TABLE:
        kind = 0
        if HAS_TYPES:
            kind = row_of(types_ptr, token, num_types)
        total += tl.load(type_table_ptr + kind * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    normed = layer_scaled(total, mask, eps, HIDDEN) * weight + bias
    tl.store(out_ptr + token.to(tl.int64) * HIDDEN + cols, normed.to(out_ptr.dtype.element_ty), mask=mask)


@kernel("cu_seqlens_ptr", "positions_ptr", "num_seqs")
def _write_positions(cu_seqlens_ptr, positions_ptr, num_seqs, SCAN: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    tl.store(positions_ptr + token, position_of(cu_seqlens_ptr, num_seqs, token, SCAN))


def embed_tokens(
    input_ids: Tensor, cu_seqlens: Tensor, table: Tensor, norm: RmsNorm, out: EmbeddedTokens
) -> None:
    """See rose.kernels.embedding.embed_tokens."""
    num_tokens, hidden = out.hidden.shape
    block = block_of(hidden)
    launch(
        _embed_tokens,
        (num_tokens,),
        input_ids,
        cu_seqlens,
        table,
        norm.weight,
        out.residual,
        out.hidden,
        out.positions,
        len(cu_seqlens) - 1,
        len(table),
        norm.eps,
        HIDDEN=hidden,
        BLOCK=block,
        SCAN=SCAN,
        num_warps=warps_for(block),
    )


def embed_bert(
    input_ids: Tensor, cu_seqlens: Tensor, token_type_ids: Tensor | None, tables: BertTables, out: Tensor
) -> None:
    """See rose.kernels.embedding.embed_bert."""
    num_tokens, hidden = out.shape
    block = block_of(hidden)
    launch(
        _embed_bert,
        (num_tokens,),
        input_ids,
        cu_seqlens,
        input_ids if token_type_ids is None else token_type_ids,
        tables.word,
        tables.word if tables.position is None else tables.position,
        tables.word if tables.token_type is None else tables.token_type,
        tables.norm.weight,
        tables.norm.bias,
        out,
        len(cu_seqlens) - 1,
        len(tables.word),
        1 if tables.token_type is None else len(tables.token_type),
        tables.position_offset,
        tables.norm.eps,
        HAS_POSITIONS=tables.position is not None,
        HAS_TYPES=token_type_ids is not None,
        HAS_TYPE_TABLE=tables.token_type is not None,
        HIDDEN=hidden,
        BLOCK=block,
        SCAN=SCAN,
        num_warps=warps_for(block),
    )


def write_positions(cu_seqlens: Tensor, out: Tensor) -> None:
    """See rose.kernels.embedding.write_positions."""
    grid, num_seqs = (len(out),), len(cu_seqlens) - 1
    launch(_write_positions, grid, cu_seqlens, out, num_seqs, SCAN=SCAN, num_warps=1)
