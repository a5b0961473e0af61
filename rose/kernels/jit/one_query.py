"""One query a sequence: a program takes one head and all, or a share, of the sequence's keys.

No product of matrices: every key and value is used once, so what counts is how many are on their way.
"""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import block_of, ceil_div, device_function, kernel, launch, wait_for_inputs
from rose.kernels.one_query import SCRATCH_TAIL

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.one_query import OneQuery, PickedRows

# Below any score: a program without keys must add nothing rather than NaN.
_LOWEST = tl.constexpr(-1e30)
_TAIL = tl.constexpr(SCRATCH_TAIL)
# Batches this short are one program a head and sequence: a second launch would cost more.
_WHOLE_TOKENS = 256
# Keys that are worth a program of their own, and programs that one sequence is shared by at most.
_MIN_KEYS, _MAX_SPLITS = 128, 16
# Elements of a program's tile of keys, and of values.
_TILE, _WARPS, _STAGES = 4096, 4, 3


@device_function
def _store_mean(out_ptr, at, cols, total, weight, live, HEAD_DIM: tl.constexpr):
    """total / weight; zeros of an empty sequence. A weight of zero is NaN elsewhere, and shall show."""
    mean = total / tl.where(live, weight, 1.0)
    mean = mean.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at * HEAD_DIM + cols, mean, mask=cols < HEAD_DIM)


@device_function
def _copy_row(source_ptr, out_ptr, row, sequence, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    values = tl.load(source_ptr + row * WIDTH + cols, mask=live & (cols < WIDTH), other=0.0)
    tl.store(out_ptr + sequence * WIDTH + cols, values, mask=cols < WIDTH)


@kernel("cu_seqlens_ptr")
def _one_query(
    q_ptr,
    k_ptr,
    v_ptr,
    hidden_ptr,
    cu_seqlens_ptr,
    out_ptr,
    picked_ptr,
    scratch_ptr,
    q_stride,
    k_stride,
    v_stride,
    scale_log2,
    LAST: tl.constexpr,
    ALONE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    sequence, head = at // QUERY_HEADS, at % QUERY_HEADS
    split, splits = tl.program_id(1), tl.num_programs(1)
    # The offsets were there before this forward's first kernel: they need not wait for the one before.
    start = tl.load(cu_seqlens_ptr + sequence)
    stop = tl.load(cu_seqlens_ptr + sequence + 1)
    wait_for_inputs(PDL)
    live = start < stop
    row = (stop - 1 if LAST else start).to(tl.int64)
    if ALONE:
        stop = tl.minimum(stop, start + 1)
    cols = tl.arange(0, BLOCK_D)
    q_at = row * q_stride + head * HEAD_DIM + cols
    q = tl.load(q_ptr + q_at, mask=live & (cols < HEAD_DIM), other=0.0).to(tl.float32) * scale_log2
    k_ptr += head // GROUP * HEAD_DIM
    v_ptr += head // GROUP * HEAD_DIM
    span = tl.cdiv(stop - start, splits)
    first = start + split * span
    last = tl.minimum(first + span, stop)
    # A running softmax in each row of the tile, so that nothing is reduced over rows before the end.
    largest = tl.full([BLOCK_N], _LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for near in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        keys = near + tl.arange(0, BLOCK_N)
        mask = (keys < last)[:, None] & (cols < HEAD_DIM)[None, :]
        k_at = (keys.to(tl.int64) * k_stride)[:, None] + cols[None, :]
        k = tl.load(k_ptr + k_at, mask=mask, other=0.0)
        v_at = (keys.to(tl.int64) * v_stride)[:, None] + cols[None, :]
        v = tl.load(v_ptr + v_at, mask=mask, other=0.0)
        scores = tl.where(keys < last, tl.sum(k.to(tl.float32) * q[None, :], axis=1), -float("inf"))
        larger = tl.maximum(largest, scores)
        shrink, weights = tl.exp2(largest - larger), tl.exp2(scores - larger)
        weight = weight * shrink + weights
        total = total * shrink[:, None] + weights[:, None] * v.to(tl.float32)
        largest = larger
    most = tl.max(largest, axis=0)
    share = tl.exp2(largest - most)
    weight = tl.sum(weight * share, axis=0)
    total = tl.sum(total * share[:, None], axis=0)
    if splits == 1:
        _store_mean(out_ptr, at, cols, total, weight, live, HEAD_DIM)
    else:
        scratch_ptr += (at * splits + split) * (HEAD_DIM + _TAIL)
        tl.store(scratch_ptr + cols, total, mask=cols < HEAD_DIM)
        tl.store(scratch_ptr + HEAD_DIM, most)
        tl.store(scratch_ptr + HEAD_DIM + 1, weight)
    if (head == 0) & (split == 0):
        _copy_row(hidden_ptr, picked_ptr, row, sequence, live, HIDDEN, BLOCK_H)


@kernel("cu_seqlens_ptr", "splits")
def _add_splits(
    scratch_ptr,
    cu_seqlens_ptr,
    out_ptr,
    splits,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    sequence = at // QUERY_HEADS
    live = tl.load(cu_seqlens_ptr + sequence) < tl.load(cu_seqlens_ptr + sequence + 1)
    wait_for_inputs(PDL)
    parts, cols = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    mask = parts < splits
    part_ptr = scratch_ptr + (at * splits + parts) * (HEAD_DIM + _TAIL)
    largest = tl.load(part_ptr + HEAD_DIM, mask=mask, other=_LOWEST)
    weight = tl.load(part_ptr + HEAD_DIM + 1, mask=mask, other=0.0)
    inside = mask[:, None] & (cols < HEAD_DIM)[None, :]
    total = tl.load(part_ptr[:, None] + cols[None, :], mask=inside, other=0.0)
    share = tl.exp2(largest - tl.max(largest, axis=0))
    weight = tl.sum(weight * share, axis=0)
    total = tl.sum(total * share[:, None], axis=0)
    _store_mean(out_ptr, at, cols, total, weight, live, HEAD_DIM)


@dataclass(frozen=True, slots=True)
class OneQueryPlan:
    """splits: programs that share a sequence's keys. block: keys at once. warps, stages: as in Triton."""

    splits: int
    block: int
    warps: int = _WARPS
    stages: int = _STAGES


def plan_for(num_tokens: int, num_rows: int, head_dim: int, scratch_rows: int) -> OneQueryPlan:
    """How a batch is divided. num_rows: heads of all sequences, each at least a program.

    Splits are a power of two by all T tokens, as for all that is known one sequence has them.
    """
    splits = 1
    if num_tokens > _WHOLE_TOKENS:
        wanted = min(scratch_rows // num_rows, ceil_div(num_tokens, _MIN_KEYS), _MAX_SPLITS)
        splits = 1 << (max(wanted, 1).bit_length() - 1)
    return OneQueryPlan(splits, max(_TILE // block_of(head_dim), 1))


def one_query_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    hidden: Tensor,
    cu_seqlens: Tensor,
    query: OneQuery,
    out: PickedRows,
    plan: OneQueryPlan | None = None,
) -> None:
    """See rose.kernels.one_query.one_query_attention. plan: in place of `plan_for`'s.

    Raises:
        ValueError: the plan has more splits than are added up.
    """
    num_tokens, num_heads, head_dim = qkv[0].shape
    num_rows = (len(cu_seqlens) - 1) * num_heads
    plan = plan or plan_for(num_tokens, num_rows, head_dim, len(out.scratch))
    if plan.splits > _MAX_SPLITS:
        raise ValueError(f"{plan.splits} splits; at most {_MAX_SPLITS} are added up")
    _launch_splits(qkv, hidden, cu_seqlens, query, out, plan)
    if plan.splits == 1:
        return
    launch(
        _add_splits,
        (num_rows,),
        out.scratch,
        cu_seqlens,
        out.context,
        plan.splits,
        QUERY_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_of(head_dim),
        SPLITS=_MAX_SPLITS,
        num_warps=4,
    )


def _launch_splits(
    qkv: tuple[Tensor, Tensor, Tensor],
    hidden: Tensor,
    cu_seqlens: Tensor,
    query: OneQuery,
    out: PickedRows,
    plan: OneQueryPlan,
) -> None:
    q, k, v = qkv
    _, num_heads, head_dim = q.shape
    launch(
        _one_query,
        ((len(cu_seqlens) - 1) * num_heads, plan.splits),
        q,
        k,
        v,
        hidden,
        cu_seqlens,
        out.context,
        out.hidden,
        out.scratch,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        query.scale / math.log(2),
        LAST=query.which == "last",
        ALONE=query.alone,
        QUERY_HEADS=num_heads,
        GROUP=num_heads // k.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=block_of(head_dim),
        HIDDEN=hidden.shape[1],
        BLOCK_H=block_of(hidden.shape[1]),
        BLOCK_N=plan.block,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
