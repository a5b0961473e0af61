"""Rows of this kernel are heads of tokens; a program takes a few of them, both halves side by side."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import (
    block_of,
    ceil_div,
    kernel,
    launch,
    rows_a_program,
    wait_for_inputs,
    warps_for,
)
from rose.kernels.jit.norm import load_sum, splits_of

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.rope import QkRope

# Heads a program while programs are scarce: of 128 elements, with a 16-byte access a thread and half.
_FEW_ROWS = 8


@kernel("positions_ptr", "num_tokens")
def _qk_norm_rope(
    source_ptr,
    positions_ptr,
    bias_ptr,
    weight_ptr,
    cos_sin_ptr,
    scales_ptr,
    qkv_ptr,
    num_tokens,
    eps,
    SPLITS: tl.constexpr,
    WITH_VALUES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    ROTATED_HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    HEADS: tl.constexpr = ALL_HEADS if WITH_VALUES else ROTATED_HEADS
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = item // HEADS, item % HEADS
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (token < num_tokens)[:, None] & (cols < HALF)
    start = (token.to(tl.int64) * ALL_HEADS + head) * (2 * HALF)
    at = start[:, None] + cols
    split_stride = tl.cast(num_tokens, tl.int64) * (ALL_HEADS * 2 * HALF)
    first = load_sum(source_ptr, at, mask, split_stride, SPLITS)
    second = load_sum(source_ptr, at + HALF, mask, split_stride, SPLITS)
    if HAS_BIAS:
        bias = bias_ptr + (head * (2 * HALF))[:, None] + cols
        first += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
        second += tl.load(bias + HALF, mask=mask, other=0.0).to(tl.float32)

    rotated = mask & (head < ROTATED_HEADS)[:, None]
    position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0)
    angle = cos_sin_ptr + (position * (2 * HALF))[:, None] + cols
    cos = tl.load(angle, mask=rotated, other=1.0)
    sin = tl.load(angle + HALF, mask=rotated, other=0.0)
    if HAS_NORM:
        weight = weight_ptr + ((head >= QUERY_HEADS).to(tl.int32) * (2 * HALF))[:, None] + cols
        first_weight = tl.load(weight, mask=rotated, other=1.0).to(tl.float32)
        second_weight = tl.load(weight + HALF, mask=rotated, other=1.0).to(tl.float32)
        mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        scale = tl.where(head < ROTATED_HEADS, tl.rsqrt(mean_square + eps), 1.0)[:, None]
        first = first * scale * first_weight
        second = second * scale * second_weight
    turned, turned_second = first * cos - second * sin, second * cos + first * sin
    if HAS_SCALES:
        inverse = 1.0 / tl.load(scales_ptr + head, mask=token < num_tokens, other=1.0)[:, None]
        turned, turned_second = turned * inverse, turned_second * inverse
    dtype = qkv_ptr.dtype.element_ty  # e4m3 takes the largest number for what is beyond it: cvt.satfinite
    tl.store(qkv_ptr + at, turned.to(dtype), mask=mask)
    tl.store(qkv_ptr + at + HALF, turned_second.to(dtype), mask=mask)


def qk_norm_rope(
    source: Tensor, positions: Tensor, rope: QkRope, qkv: Tensor, scales: Tensor | None = None
) -> None:
    """See rose.kernels.rope.qk_norm_rope."""
    num_tokens = len(qkv)
    all_heads = rope.rotated_heads + rope.num_kv_heads
    # In place and without a bias the values stay as they are.
    with_values = source.dim() == 3 or rope.bias is not None or scales is not None
    heads = all_heads if with_values else rope.rotated_heads
    rows = _FEW_ROWS * rows_a_program(ceil_div(num_tokens * heads, _FEW_ROWS))
    half = rope.head_dim // 2
    block = block_of(half)
    launch(
        _qk_norm_rope,
        (ceil_div(num_tokens * heads, rows),),
        source,
        positions,
        rope.cos_sin if rope.bias is None else rope.bias,
        rope.cos_sin if rope.weight is None else rope.weight,
        rope.cos_sin,
        rope.cos_sin if scales is None else scales,
        qkv,
        num_tokens,
        rope.eps,
        SPLITS=splits_of(source),
        WITH_VALUES=with_values,
        HAS_BIAS=rope.bias is not None,
        HAS_NORM=rope.weight is not None,
        HAS_SCALES=scales is not None,
        QUERY_HEADS=rope.num_heads,
        ROTATED_HEADS=rope.rotated_heads,
        ALL_HEADS=all_heads,
        HALF=half,
        BLOCK=block,
        ROWS=rows,
        num_warps=warps_for(rows * block),
    )
