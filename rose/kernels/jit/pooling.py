"""Pooling: parts of sequences in parallel, then their sum; single rows; and the int8 quantiser of both."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import triton.language as tl

from rose.kernels.jit.compile import (
    block_of,
    ceil_div,
    device_function,
    kernel,
    launch,
    wait_for_inputs,
    warps_for,
)
from rose.kernels.jit.norm import load_sum, rms_scaled, splits_of

if TYPE_CHECKING:
    from torch import Tensor

    from rose.device_batch import Outputs
    from rose.kernels.pooling import LastHidden, Which

# Elements of a program's tile: 4 rows of 1024, whose loads in flight hide most of the memory's latency.
_TILE = 4096
# Batches this short are one program a sequence with a taller tile: a second launch would cost more.
_SHORT_TOKENS, _SHORT_TILE = 32, 16384
# Parts a sequence at most: 128 x 32 tokens at 4096, one wave of an H200.
_MAX_PARTS = 128
# Parts and elements that a program adds up at once: all parts, because turns of a loop wait for memory one
# after another (8 turns of 8 parts were 5 of 8.7 us at 512 tokens), and few columns, for many programs.
_FEW_PARTS, _FINISH_ELEMENTS = 8, 4096


@device_function
def _quantized(x):
    """round(tanh(x) * 127) as int8, half to even.

    tanh from exp: 1e-7 off, far below half a step of 1/127. Adding and subtracting 1.5 * 2^23 leaves
    no fraction bits, so the hardware's round-half-even does the rounding.
    """
    tanh = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return ((tanh * 127.0 + 12582912.0) - 12582912.0).to(tl.int8)


@device_function
def _emit(vector, vectors_ptr, int8_ptr, at, mask, QUANTIZE: tl.constexpr):
    tl.store(vectors_ptr + at, vector.to(vectors_ptr.dtype.element_ty), mask=mask)
    if QUANTIZE:
        tl.store(int8_ptr + at, _quantized(vector), mask=mask)


@kernel("bounds_ptr", "out_ptr", "int8_ptr", "ends_at", "num_tokens")
def _sum_parts(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bounds_ptr,
    out_ptr,
    int8_ptr,
    ends_at,
    num_tokens,
    eps,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    ADDS: tl.constexpr,
    WHOLE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    sequence, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    stop = tl.load(bounds_ptr + ends_at + sequence)
    start = tl.load(bounds_ptr + sequence)
    length = stop - start
    span = tl.cdiv(length, parts)
    start += part * span
    end = tl.minimum(start + span, stop)
    cols = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    while start < end:
        rows = (start + tl.arange(0, ROWS))[:, None]
        mask = (rows < end) & (cols < HIDDEN)[None, :]
        at = rows.to(tl.int64) * HIDDEN + cols[None, :]
        x = load_sum(x_ptr, at, mask, tl.cast(num_tokens, tl.int64) * HIDDEN, SPLITS)
        if ADDS:
            x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            x = rms_scaled(x, eps, HIDDEN)
        total += tl.sum(x, axis=0)
        start += ROWS
    at = (sequence * parts + part).to(tl.int64) * HIDDEN + cols
    if WHOLE:
        _emit_mean(total, length, weight_ptr, out_ptr, int8_ptr, at, cols, cols < HIDDEN, NORM, QUANTIZE)
    else:
        tl.store(out_ptr + at, total, mask=cols < HIDDEN)


@device_function
def _emit_mean(
    total, length, weight_ptr, out_ptr, int8_ptr, at, cols, mask, NORM: tl.constexpr, QUANTIZE: tl.constexpr
):
    vector = total / tl.maximum(length, 1).to(tl.float32)
    if NORM:
        vector *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    _emit(vector, out_ptr, int8_ptr, at, mask, QUANTIZE)


@kernel("bounds_ptr", "vectors_ptr", "int8_ptr", "ends_at", "parts")
def _finish_mean(
    scratch_ptr,
    bounds_ptr,
    weight_ptr,
    vectors_ptr,
    int8_ptr,
    ends_at,
    parts,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    sequence = tl.program_id(0)
    rows = tl.arange(0, PARTS)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    at = (sequence * parts + rows).to(tl.int64) * HIDDEN + cols[None, :]
    total = tl.sum(tl.load(scratch_ptr + at, mask=(rows < parts) & mask[None, :], other=0.0), axis=0)
    length = tl.load(bounds_ptr + ends_at + sequence) - tl.load(bounds_ptr + sequence)
    at = sequence.to(tl.int64) * HIDDEN + cols
    _emit_mean(total, length, weight_ptr, vectors_ptr, int8_ptr, at, cols, mask, NORM, QUANTIZE)


@kernel("cu_seqlens_ptr", "vectors_ptr", "int8_ptr", "num_tokens")
def _gather_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    cu_seqlens_ptr,
    vectors_ptr,
    int8_ptr,
    num_tokens,
    eps,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    ADDS: tl.constexpr,
    WHICH: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    sequence = tl.program_id(0)
    start = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    row = start
    if WHICH == "last":
        row = end - 1
    if WHICH == "only":
        row = sequence
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    live = mask & (start < end)
    at = row.to(tl.int64) * HIDDEN + cols
    vector = load_sum(x_ptr, at, live, tl.cast(num_tokens, tl.int64) * HIDDEN, SPLITS)
    if ADDS:
        vector += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
    if NORM:
        vector = rms_scaled(vector, eps, HIDDEN)
        vector *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    _emit(vector, vectors_ptr, int8_ptr, sequence.to(tl.int64) * HIDDEN + cols, mask, QUANTIZE)


@kernel("vectors_ptr", "int8_ptr", "count")
def _tanh_int8(vectors_ptr, int8_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(int8_ptr + at, _quantized(tl.load(vectors_ptr + at, mask=mask, other=0.0)), mask=mask)


@dataclass(frozen=True, slots=True)
class _Input:
    """Hidden states x, with what the final norm needs or None for states that are normed already."""

    x: Tensor
    last: LastHidden | None

    @classmethod
    def of(cls, last: LastHidden) -> _Input:
        """Those of the last layer, before their norm."""
        return cls(last.residual if last.x is None else last.x, last)

    @property
    def adds(self) -> bool:
        """Whether x is to be added to the residual stream."""
        return self.last is not None and self.last.x is not None

    @property
    def residual(self) -> Tensor:
        return self.x if self.last is None else self.last.residual

    @property
    def weight(self) -> Tensor:
        return self.x if self.last is None else self.last.norm.weight

    @property
    def eps(self) -> float:
        return 0.0 if self.last is None else self.last.norm.eps


def mean_pool(hidden: Tensor, bounds: Tensor, outputs: Outputs, scratch: Tensor) -> None:
    """See rose.kernels.pooling.mean_pool."""
    _launch_mean(_Input(hidden, None), bounds, outputs, scratch)


def norm_mean_pool(last: LastHidden, bounds: Tensor, outputs: Outputs, scratch: Tensor) -> None:
    """See rose.kernels.pooling.norm_mean_pool."""
    _launch_mean(_Input.of(last), bounds, outputs, scratch)


def gather_rows(hidden: Tensor, cu_seqlens: Tensor, which: Which, outputs: Outputs) -> None:
    """See rose.kernels.pooling.gather_rows."""
    _launch_gather(_Input(hidden, None), cu_seqlens, which, outputs)


def norm_gather_rows(last: LastHidden, cu_seqlens: Tensor, which: Which, outputs: Outputs) -> None:
    """See rose.kernels.pooling.norm_gather_rows."""
    _launch_gather(_Input.of(last), cu_seqlens, which, outputs)


def tanh_int8(vectors: Tensor, out: Tensor) -> None:
    """See rose.kernels.quantize.tanh_int8."""
    count = vectors.numel()
    launch(_tanh_int8, (ceil_div(count, 1024),), vectors, out, count, BLOCK=1024, num_warps=4)


def parts_for(num_seqs: int, num_tokens: int, scratch_rows: int) -> int:
    """Programs a sequence: one in short batches, else a power of two that fits the scratch, 4 tokens each.

    4 of all T tokens: how the sequences share them is not known where a graph is captured.
    """
    if num_tokens <= _SHORT_TOKENS:
        return 1
    wanted = min(scratch_rows // num_seqs, ceil_div(num_tokens, 4), _MAX_PARTS)
    return 1 << (max(wanted, 1).bit_length() - 1)


class _Mean(NamedTuple):
    """A pooling by mean. parts: programs a sequence, of which each writes a sum, unless there is only one."""

    states: _Input
    bounds: Tensor
    outputs: Outputs
    scratch: Tensor
    parts: int

    @property
    def ends_at(self) -> int:
        """Offsets are starts and ends at once, one apart; spans are all starts, then all ends."""
        return 1 if self.bounds.dim() == 1 else self.bounds.shape[1]

    @property
    def int8(self) -> Tensor:
        """Where quantised values go; any tensor if there are none."""
        return self.outputs.vectors if self.outputs.int8 is None else self.outputs.int8


def _launch_mean(states: _Input, bounds: Tensor, outputs: Outputs, scratch: Tensor) -> None:
    parts = parts_for(len(outputs.vectors), states.residual.shape[0], len(scratch))
    mean = _Mean(states, bounds, outputs, scratch, parts)
    _launch_sums(mean)
    if parts > 1:
        _launch_finish(mean)


def _launch_sums(mean: _Mean) -> None:
    states, outputs = mean.states, mean.outputs
    num_seqs, hidden = outputs.vectors.shape
    num_tokens, block = states.residual.shape[0], block_of(hidden)
    tile = _SHORT_TILE if num_tokens <= _SHORT_TOKENS else _TILE
    launch(
        _sum_parts,
        (num_seqs, mean.parts),
        states.x,
        states.residual,
        states.weight,
        mean.bounds,
        outputs.vectors if mean.parts == 1 else mean.scratch,
        mean.int8,
        mean.ends_at,
        num_tokens,
        states.eps,
        SPLITS=splits_of(states.x),
        NORM=states.last is not None,
        ADDS=states.adds,
        WHOLE=mean.parts == 1,
        QUANTIZE=outputs.int8 is not None,
        HIDDEN=hidden,
        BLOCK=block,
        ROWS=max(tile // block, 1),
        num_warps=8 if tile == _SHORT_TILE else warps_for(block),
    )


def _launch_finish(mean: _Mean) -> None:
    outputs = mean.outputs
    num_seqs, hidden = outputs.vectors.shape
    most = _FEW_PARTS if mean.parts <= _FEW_PARTS else _MAX_PARTS
    columns = min(block_of(hidden), _FINISH_ELEMENTS // most)
    launch(
        _finish_mean,
        (num_seqs, ceil_div(hidden, columns)),
        mean.scratch,
        mean.bounds,
        mean.states.weight,
        outputs.vectors,
        mean.int8,
        mean.ends_at,
        mean.parts,
        NORM=mean.states.last is not None,
        QUANTIZE=outputs.int8 is not None,
        HIDDEN=hidden,
        BLOCK=columns,
        PARTS=most,
        num_warps=4,
    )


def _launch_gather(states: _Input, cu_seqlens: Tensor, which: Which, outputs: Outputs) -> None:
    num_seqs, hidden = outputs.vectors.shape
    block = block_of(hidden)
    launch(
        _gather_rows,
        (num_seqs,),
        states.x,
        states.residual,
        states.weight,
        cu_seqlens,
        outputs.vectors,
        outputs.vectors if outputs.int8 is None else outputs.int8,
        states.residual.shape[0],
        states.eps,
        SPLITS=splits_of(states.x),
        NORM=states.last is not None,
        ADDS=states.adds,
        WHICH=which,
        QUANTIZE=outputs.int8 is not None,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=warps_for(block),
    )
