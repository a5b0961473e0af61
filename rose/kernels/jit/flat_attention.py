"""Attention over tiles of the flat token axis, whatever sequences lie in them; offsets are on the device.

A program takes a few adjacent tokens and goes once over the keys of all sequences that those belong to. So
the grid depends on the token count alone, no program is left without work, and short sequences share a tile:
16 x 32 tokens are as many programs as 1 x 512. Keys of other sequences in the tile count with weight zero.
Source: Dao, FlashAttention-2, arXiv 2307.08691.
"""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, N806

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import ceil_div, device_function, kernel, launch, wait_for_inputs
from rose.kernels.jit.norm import load_sum, splits_of

if TYPE_CHECKING:
    from torch import Tensor

    from rose.attention.base import AttentionSpec
    from rose.attention.flat_plan import FlatPlan
    from rose.kernels.rope import QkRope

# Past any token: where no sequence ends.
_NOWHERE = tl.constexpr(1 << 30)
# Offsets that programs compare their tokens with at once.
_OFFSETS = (1, 64)


@device_function
def _own_sequence(tokens, cu_seqlens_ptr, num_seqs, OFFSETS: tl.constexpr):
    """Where each token's sequence starts and ends; past the last one it ends _NOWHERE."""
    if OFFSETS == 1:
        stop = tl.load(cu_seqlens_ptr + 1)
        start = tl.zeros_like(tokens)
        end = tl.where(tokens < stop, stop, _NOWHERE)
    else:
        start = tl.zeros_like(tokens)
        end = tl.zeros_like(tokens) + _NOWHERE
        for first in range(0, num_seqs, OFFSETS):
            index = first + tl.arange(0, OFFSETS)
            offset = tl.load(cu_seqlens_ptr + 1 + index, mask=index < num_seqs, other=_NOWHERE)[None, :]
            past = offset <= tokens[:, None]
            start = tl.maximum(start, tl.max(tl.where(past, offset, 0), axis=1))
            end = tl.minimum(end, tl.min(tl.where(past, _NOWHERE, offset), axis=1))
    return start, end


@device_function
def _visible(tokens, cu_seqlens_ptr, num_seqs, OFFSETS: tl.constexpr, CAUSAL: tl.constexpr):
    """Of each token whether it is one, and the keys [start, end) that it sees; then those that any sees."""
    start, end = _own_sequence(tokens, cu_seqlens_ptr, num_seqs, OFFSETS)
    real = end < _NOWHERE
    if CAUSAL:
        end = tl.minimum(end, tokens + 1)
    end = tl.where(real, end, 0)
    first = tl.min(tl.where(real, start, _NOWHERE), axis=0)
    return real, start, end, first, tl.max(end, axis=0)


@device_function
def _add_keys(scores, values, keys, start, end, state, ONE_RANGE: tl.constexpr):
    """Online softmax: state (largest score, sum of weights, weighted values) with one more tile of keys.

    scores: in units of log2. A token's first tile may hold no key of its own: the largest score starts finite
    so that such a tile adds nothing rather than NaN.
    """
    largest, weight, total = state
    if ONE_RANGE:
        seen = keys[None, :] < tl.max(end, axis=0)
    else:
        seen = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
    scores = tl.where(seen, scores, -float("inf"))
    larger = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - larger[:, None])
    shrink = tl.exp2(largest - larger)
    total = tl.dot(weights.to(values.dtype), values, total * shrink[:, None])
    return larger, weight * shrink + tl.sum(weights, axis=1), total


@device_function
def _empty_state(BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr):
    largest = tl.full([BLOCK_M], -1e30, tl.float32)
    return largest, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)


@device_function
def _store(out_ptr, at, real, state):
    """The weighted mean of the values to out_ptr + at, for tokens that are real."""
    _, weight, total = state
    mean = total / tl.where(real, weight, 1.0)[:, None]
    tl.store(out_ptr + at, mean.to(out_ptr.dtype.element_ty), mask=real[:, None])


@kernel("cu_seqlens_ptr", "num_seqs")
def _flat_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_seqlens_ptr,
    num_seqs,
    q_stride,
    k_stride,
    v_stride,
    scale_log2,
    CAUSAL: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    tokens = tl.program_id(0) * (BLOCK_M // HEADS) + rows // HEADS
    first_head = tl.program_id(1) * HEADS
    head, kv_head = first_head + rows % HEADS, first_head // GROUP
    # The offsets were there before this forward's first kernel: they need not wait for the one before.
    real, start, end, first, last = _visible(tokens, cu_seqlens_ptr, num_seqs, OFFSETS, CAUSAL)
    wait_for_inputs(PDL)
    q_at = (tokens.to(tl.int64) * q_stride + head * HEAD_DIM)[:, None] + cols[None, :]
    q = tl.load(q_ptr + q_at, mask=real[:, None], other=0.0)
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    largest, weight, total = _empty_state(BLOCK_M, HEAD_DIM)
    for at in range(first, last, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        near = keys < last
        k_at = (keys.to(tl.int64) * k_stride)[None, :] + cols[:, None]
        k = tl.load(k_ptr + k_at, mask=near[None, :], other=0.0)
        v_at = (keys.to(tl.int64) * v_stride)[:, None] + cols[None, :]
        v = tl.load(v_ptr + v_at, mask=near[:, None], other=0.0)
        scores = tl.dot(q, k) * scale_log2
        state = (largest, weight, total)
        largest, weight, total = _add_keys(scores, v, keys, start, end, state, OFFSETS == 1 and not CAUSAL)
    out_at = ((tokens.to(tl.int64) * QUERY_HEADS + head) * HEAD_DIM)[:, None] + cols[None, :]
    _store(out_ptr, out_at, real, (largest, weight, total))


@device_function
def _angles(cos_sin_ptr, places, mask, HALF: tl.constexpr):
    """cos and sin f32[rows, HALF] of tokens' places in their sequences."""
    at = cos_sin_ptr + (places * (2 * HALF))[:, None] + tl.arange(0, HALF)[None, :]
    cos = tl.load(at, mask=mask[:, None], other=0.0).to(tl.float32)
    return cos, tl.load(at + HALF, mask=mask[:, None], other=0.0).to(tl.float32)


@device_function
def _finished_heads(
    halves,
    angles,
    bias_ptr,
    weight_ptr,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Both halves f32[rows, HALF] of heads of the product, with bias, normed and rotated."""
    first, second = halves
    cos, sin = angles
    if HAS_BIAS:
        first += tl.load(bias_ptr).to(tl.float32)
        second += tl.load(bias_ptr + HALF).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(weight_ptr).to(tl.float32)
        second = second * scale * tl.load(weight_ptr + HALF).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@device_function
def _loaded_keys(
    keys_ptr,
    values_ptr,
    cos_sin_ptr,
    cu_seqlens_ptr,
    num_seqs,
    at,
    last,
    split_stride,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """A tile of keys as the product has them, both halves, their angles and values: all that is loaded."""
    keys = at + tl.arange(0, BLOCK_N)
    near = keys < last
    rows = (keys.to(tl.int64) * WIDTH)[:, None]
    k_at = keys_ptr + rows + tl.arange(0, HALF)[None, :]
    first = load_sum(k_at, 0, near[:, None], split_stride, SPLITS)
    second = load_sum(k_at + HALF, 0, near[:, None], split_stride, SPLITS)
    start, _ = _own_sequence(keys, cu_seqlens_ptr, num_seqs, OFFSETS)
    cos, sin = _angles(cos_sin_ptr, keys - start, near, HALF)
    v_at = values_ptr + rows + tl.arange(0, 2 * HALF)[None, :]
    return keys, first, second, cos, sin, load_sum(v_at, 0, near[:, None], split_stride, SPLITS)


@device_function
def _add_product_keys(
    loaded,
    queries,
    k_bias_ptr,
    v_bias_ptr,
    weight_ptr,
    eps,
    start,
    end,
    state,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
    ONE_RANGE: tl.constexpr,
):
    """As `_add_keys`, of keys that are still to be normed and rotated; queries: both halves, scaled."""
    keys, first, second, cos, sin, values = loaded
    q_first, q_second = queries
    if HAS_BIAS:
        values += tl.load(v_bias_ptr + tl.arange(0, 2 * HALF)[None, :]).to(tl.float32)
    k_first, k_second = _finished_heads(
        (first, second), (cos, sin), k_bias_ptr, weight_ptr, eps, HAS_BIAS, HAS_NORM, HALF
    )
    scores = tl.dot(q_first, tl.trans(k_first.to(q_first.dtype)))
    scores = tl.dot(q_second, tl.trans(k_second.to(q_first.dtype)), scores)
    return _add_keys(scores, values.to(q_first.dtype), keys, start, end, state, ONE_RANGE)


@kernel("cu_seqlens_ptr", "num_tokens", "num_seqs")
def _flat_attention_of_product(
    source_ptr,
    bias_ptr,
    weight_ptr,
    cos_sin_ptr,
    out_ptr,
    cu_seqlens_ptr,
    num_tokens,
    num_seqs,
    scale_log2,
    eps,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF
    KV_HEADS: tl.constexpr = QUERY_HEADS // GROUP
    WIDTH: tl.constexpr = (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM
    ONE_RANGE: tl.constexpr = OFFSETS == 1 and not CAUSAL
    dtype = out_ptr.dtype.element_ty
    rows, half, cols = tl.arange(0, BLOCK_M), tl.arange(0, HALF)[None, :], tl.arange(0, HEAD_DIM)[None, :]
    tokens = tl.program_id(0) * (BLOCK_M // HEADS) + rows // HEADS
    first_head = tl.program_id(1) * HEADS
    head, k_head = (first_head + rows % HEADS)[:, None], QUERY_HEADS + first_head // GROUP
    v_head = k_head + KV_HEADS
    keys_ptr, values_ptr = source_ptr + k_head * HEAD_DIM, source_ptr + v_head * HEAD_DIM
    k_bias, v_bias = bias_ptr + k_head * HEAD_DIM + half, bias_ptr + v_head * HEAD_DIM
    k_weight = weight_ptr + HEAD_DIM + half
    real, start, end, first, last = _visible(tokens, cu_seqlens_ptr, num_seqs, OFFSETS, CAUSAL)
    q_angles = _angles(cos_sin_ptr, tokens - start, real, HALF)
    wait_for_inputs(PDL)
    split_stride = tl.cast(num_tokens, tl.int64) * WIDTH
    q_at = source_ptr + (tokens.to(tl.int64) * WIDTH)[:, None] + head * HEAD_DIM + half
    q_first = load_sum(q_at, 0, real[:, None], split_stride, SPLITS)
    q_second = load_sum(q_at + HALF, 0, real[:, None], split_stride, SPLITS)
    if AT_ONCE:  # the first keys, mostly the only ones, are fetched before anything waits for the queries
        loaded = _loaded_keys(
            keys_ptr, values_ptr, cos_sin_ptr, cu_seqlens_ptr, num_seqs, first, last, split_stride,
            SPLITS, WIDTH, HALF, BLOCK_N, OFFSETS,
        )  # fmt: skip
    q_bias = bias_ptr + head * HEAD_DIM + half
    q_first, q_second = _finished_heads(
        (q_first, q_second), q_angles, q_bias, weight_ptr + half, eps, HAS_BIAS, HAS_NORM, HALF
    )
    queries = (q_first * scale_log2).to(dtype), (q_second * scale_log2).to(dtype)
    largest, weight, total = _empty_state(BLOCK_M, HEAD_DIM)
    if AT_ONCE:
        largest, weight, total = _add_product_keys(
            loaded, queries, k_bias, v_bias, k_weight, eps, start, end, (largest, weight, total),
            HAS_BIAS, HAS_NORM, HALF, ONE_RANGE,
        )  # fmt: skip
        first += BLOCK_N
    for at in range(first, last, BLOCK_N):
        later = _loaded_keys(
            keys_ptr, values_ptr, cos_sin_ptr, cu_seqlens_ptr, num_seqs, at, last, split_stride,
            SPLITS, WIDTH, HALF, BLOCK_N, OFFSETS,
        )  # fmt: skip
        largest, weight, total = _add_product_keys(
            later, queries, k_bias, v_bias, k_weight, eps, start, end, (largest, weight, total),
            HAS_BIAS, HAS_NORM, HALF, ONE_RANGE,
        )  # fmt: skip
    out_at = ((tokens.to(tl.int64) * QUERY_HEADS)[:, None] + head) * HEAD_DIM + cols
    _store(out_ptr, out_at, real, (largest, weight, total))


def flat_attention(
    qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, spec: AttentionSpec, plan: FlatPlan, out: Tensor
) -> None:
    """out [T, Hq, D] = softmax(q kᵀ · scale) v of each sequence; rows past cu_seqlens[-1] stay as they were.

    qkv: [T, heads, D] each, heads and D contiguous. cu_seqlens: i32[S+1]; what is past its end is not read.
    """
    q, k, v = qkv
    launch(
        _flat_attention,
        _grid(len(q), spec, plan),
        q,
        k,
        v,
        out,
        cu_seqlens,
        len(cu_seqlens) - 1,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        spec.scale / math.log(2),
        HEAD_DIM=spec.head_dim,
        **_constants(cu_seqlens, spec, plan),
    )


def flat_attention_of_product(
    source: Tensor, rope: QkRope, cu_seqlens: Tensor, spec: AttentionSpec, plan: FlatPlan, out: Tensor
) -> None:
    """The same of a QKV product that is still to be summed, normed and rotated; see qk_norm_rope.

    source: [T, (Hq + 2 Hk) D], or split-K partial sums [K, T, (Hq + 2 Hk) D] of it. Keys are normed and
    rotated by every program that meets them, which is cheaper than a kernel of its own while those are few.
    """
    num_tokens = source.shape[-2]
    launch(
        _flat_attention_of_product,
        _grid(num_tokens, spec, plan),
        source,
        source if rope.bias is None else rope.bias,
        source if rope.weight is None else rope.weight,
        rope.cos_sin,
        out,
        cu_seqlens,
        num_tokens,
        len(cu_seqlens) - 1,
        spec.scale / math.log(2),
        rope.eps,
        SPLITS=splits_of(source),
        HAS_BIAS=rope.bias is not None,
        HAS_NORM=rope.weight is not None,
        HALF=spec.head_dim // 2,
        AT_ONCE=plan.stages == 1,
        **_constants(cu_seqlens, spec, plan),
    )


def _grid(num_tokens: int, spec: AttentionSpec, plan: FlatPlan) -> tuple[int, int]:
    return ceil_div(num_tokens, plan.block_m // plan.heads), spec.num_heads // plan.heads


def _constants(cu_seqlens: Tensor, spec: AttentionSpec, plan: FlatPlan) -> dict[str, int | bool]:
    num_seqs = len(cu_seqlens) - 1
    return {
        "CAUSAL": spec.causal,
        "QUERY_HEADS": spec.num_heads,
        "GROUP": spec.num_heads // spec.num_kv_heads,
        "HEADS": plan.heads,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "OFFSETS": next((count for count in _OFFSETS if num_seqs <= count), _OFFSETS[-1]),
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
