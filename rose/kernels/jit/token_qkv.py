"""One program a token: its rows are gathered, factored or rotated, and stored."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import block_of, kernel, launch, wait_for_inputs, warps_for
from rose.kernels.jit.embedding import SCAN, position_of, row_of

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.embedding import BertTables
    from rose.kernels.token_qkv import BertQkvTables, QkvRows, RotaryQkvTable


@kernel("input_ids_ptr", "cu_seqlens_ptr", "positions_ptr", "num_seqs", "vocab_size")
def _embed_rotary_qkv(
    input_ids_ptr,
    cu_seqlens_ptr,
    embeddings_ptr,
    table_ptr,
    cos_sin_ptr,
    residual_ptr,
    qkv_ptr,
    positions_ptr,
    num_seqs,
    vocab_size,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATED_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    row = row_of(input_ids_ptr, token, vocab_size)
    at = token.to(tl.int64)
    WIDTH: tl.constexpr = 2 * HALF * ROTATED_HEADS + VALUES
    cols = tl.arange(0, BLOCK)
    embedded = tl.load(embeddings_ptr + row * HIDDEN + cols, mask=cols < HIDDEN, other=0.0)
    values_at = 2 * HALF * ROTATED_HEADS + tl.arange(0, BLOCK_VALUES)
    is_value = values_at < WIDTH
    values = tl.load(table_ptr + row * WIDTH + values_at, mask=is_value, other=0.0)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < ROTATED_HEADS) & (pairs < HALF)
    first_at = heads * (2 * HALF) + pairs
    first = tl.load(table_ptr + row * WIDTH + first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(table_ptr + row * WIDTH + first_at + HALF, mask=mask, other=0.0).to(tl.float32)
    position = position_of(cu_seqlens_ptr, num_seqs, token, SCAN)
    angles_at = cos_sin_ptr + position * (2 * HALF) + pairs
    cos = tl.load(angles_at, mask=pairs < HALF, other=1.0)
    sin = tl.load(angles_at + HALF, mask=pairs < HALF, other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(residual_ptr + at * HIDDEN + cols, embedded, mask=cols < HIDDEN)
    tl.store(qkv_ptr + at * WIDTH + values_at, values, mask=is_value)
    turned, turned_second = first * cos - second * sin, second * cos + first * sin
    tl.store(qkv_ptr + at * WIDTH + first_at, turned.to(dtype), mask=mask)
    tl.store(qkv_ptr + at * WIDTH + first_at + HALF, turned_second.to(dtype), mask=mask)
    tl.store(positions_ptr + token, position)


@kernel(
    "input_ids_ptr", "cu_seqlens_ptr", "types_ptr", "num_seqs", "vocab_size", "num_types", "position_offset"
)
def _embed_bert_qkv(
    input_ids_ptr,
    cu_seqlens_ptr,
    types_ptr,
    word_ptr,
    position_ptr,
    type_table_ptr,
    weight_ptr,
    bias_ptr,
    word_qkv_ptr,
    position_qkv_ptr,
    type_qkv_ptr,
    constant_ptr,
    hidden_ptr,
    qkv_ptr,
    num_seqs,
    vocab_size,
    num_types,
    position_offset,
    eps,
    HAS_TYPES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    at = token.to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    row = row_of(input_ids_ptr, token, vocab_size)
    place = position_of(cu_seqlens_ptr, num_seqs, token, SCAN)
    kind = row_of(types_ptr, token, num_types) if HAS_TYPES else 0
    # Queries, keys and values, and room for what is none. All rows are on their way before one is needed.
    parts = tl.arange(0, 4)[:, None]
    part_at, is_part = parts * HIDDEN + cols[None, :], (parts < 3) & mask[None, :]
    product = tl.load(word_qkv_ptr + row * (3 * HIDDEN) + part_at, mask=is_part, other=0.0).to(tl.float32)
    position_at = place * (3 * HIDDEN) + part_at
    product += tl.load(position_qkv_ptr + position_at, mask=is_part, other=0.0).to(tl.float32)
    if HAS_TYPES:
        type_at = kind * (3 * HIDDEN) + part_at
        product += tl.load(type_qkv_ptr + type_at, mask=is_part, other=0.0).to(tl.float32)
    constant = tl.load(constant_ptr + part_at, mask=is_part, other=0.0)
    total = tl.load(word_ptr + row * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    position_at = (place + position_offset) * HIDDEN + cols
    total += tl.load(position_ptr + position_at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(type_table_ptr + kind * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, total - tl.sum(total, axis=0) / HIDDEN, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    normed = centred * factor * weight + bias
    tl.store(hidden_ptr + at * HIDDEN + cols, normed.to(hidden_ptr.dtype.element_ty), mask=mask)
    product = (product * factor + constant).to(qkv_ptr.dtype.element_ty)
    tl.store(qkv_ptr + at * (3 * HIDDEN) + part_at, product, mask=is_part)


def embed_rotary_qkv(
    input_ids: Tensor, cu_seqlens: Tensor, embeddings: Tensor, table: RotaryQkvTable, out: QkvRows
) -> None:
    """See rose.kernels.token_qkv.embed_rotary_qkv."""
    num_tokens, hidden = out.residual.shape
    rope = table.rope
    values, half = rope.num_kv_heads * rope.head_dim, rope.head_dim // 2
    launch(
        _embed_rotary_qkv,
        (num_tokens,),
        input_ids,
        cu_seqlens,
        embeddings,
        table.qkv,
        rope.cos_sin,
        out.residual,
        out.qkv,
        out.positions,
        len(cu_seqlens) - 1,
        len(embeddings),
        HIDDEN=hidden,
        BLOCK=block_of(hidden),
        ROTATED_HEADS=rope.rotated_heads,
        BLOCK_HEADS=block_of(rope.rotated_heads),
        HALF=half,
        BLOCK_HALF=block_of(half),
        VALUES=values,
        BLOCK_VALUES=block_of(values),
        SCAN=SCAN,
        num_warps=warps_for(block_of(hidden)),
    )


def embed_bert_qkv(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    token_type_ids: Tensor | None,
    tables: tuple[BertTables, BertQkvTables],
    out: tuple[Tensor, Tensor],
) -> None:
    """See rose.kernels.token_qkv.embed_bert_qkv.

    Raises:
        ValueError: the model has no positions or token types of its own.
    """
    (embeddings, products), (hidden, qkv) = tables, out
    if embeddings.position is None or embeddings.token_type is None:
        raise ValueError("a BERT without positions or token types has no such tables")
    num_tokens, width = hidden.shape
    block = block_of(width)
    launch(
        _embed_bert_qkv,
        (num_tokens,),
        input_ids,
        cu_seqlens,
        input_ids if token_type_ids is None else token_type_ids,
        embeddings.word,
        embeddings.position,
        embeddings.token_type,
        embeddings.norm.weight,
        embeddings.norm.bias,
        products.word,
        products.position,
        products.token_type,
        products.constant,
        hidden,
        qkv,
        len(cu_seqlens) - 1,
        len(embeddings.word),
        len(embeddings.token_type),
        embeddings.position_offset,
        embeddings.norm.eps,
        HAS_TYPES=token_type_ids is not None,
        HIDDEN=width,
        BLOCK=block,
        SCAN=SCAN,
        num_warps=warps_for(block),
    )
