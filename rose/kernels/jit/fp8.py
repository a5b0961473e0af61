"""A program takes one row or a few, whole: their largest magnitude is known before anything is stored."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl

from rose.kernels.fp8 import E4M3_MAX, TINY
from rose.kernels.jit.activation import gelu
from rose.kernels.jit.compile import (
    block_of,
    ceil_div,
    device_function,
    kernel,
    launch,
    rows_a_program,
    wait_for_inputs,
)
from rose.kernels.jit.norm import layer_scaled, rms_scaled

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.fp8 import Fp8Rows, NormedRows, ScaledSquare
    from rose.kernels.norm import LayerNorm, RmsNorm

_MAX: tl.constexpr = tl.constexpr(E4M3_MAX)
_TINY: tl.constexpr = tl.constexpr(TINY)


@device_function
def store_fp8(x, values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH: tl.constexpr):
    """x f32[ROWS, BLOCK] as e4m3 and scales. Lanes past WIDTH must be zero; tl.max passes a NaN by, but it
    stays in the values.
    """
    store_scaled(
        x, tl.max(tl.abs(x), axis=1, keep_dims=True), values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH
    )


@device_function
def store_scaled(x, largest, values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH: tl.constexpr):
    """The same, where numbers of a row are as large as `largest` f32[ROWS, 1] at most."""
    largest = tl.maximum(largest, _TINY)
    tl.store(scale_ptr + rows, largest / _MAX, mask=rows < num_tokens)
    values = (x * (_MAX / largest)).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + rows.to(tl.int64) * WIDTH + cols, values, mask=(rows < num_tokens) & (cols < WIDTH))


@kernel("num_tokens")
def _quantize_rows(
    x_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_tokens) & (cols < WIDTH)
    x = tl.load(x_ptr + rows.to(tl.int64) * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    store_fp8(x, values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH)


@device_function
def _added_and_normed(x_ptr, residual_ptr, weight_ptr, rows, cols, mask, eps, WIDTH: tl.constexpr):
    """residual += x; its norm f32[ROWS, BLOCK], from the unrounded sum."""
    at = rows.to(tl.int64) * WIDTH + cols
    weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    total = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), mask=mask)
    return rms_scaled(total, eps, WIDTH) * weight


@kernel("num_tokens")
def _add_rms_norm_fp8(
    x_ptr,
    residual_ptr,
    weight_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_tokens) & (cols < WIDTH)
    normed = _added_and_normed(x_ptr, residual_ptr, weight_ptr, rows, cols, mask, eps, WIDTH)
    store_fp8(normed, values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH)


@kernel("num_tokens")
def _add_rms_norm_by_length(
    x_ptr,
    residual_ptr,
    weight_ptr,
    square_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    eps,
    factor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_tokens) & (cols < WIDTH)
    normed = _added_and_normed(x_ptr, residual_ptr, weight_ptr, rows, cols, mask, eps, WIDTH)
    length = tl.sqrt(tl.sum(normed * normed, axis=1, keep_dims=True))
    store_scaled(normed, length, values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH)
    scale = tl.maximum(length, _TINY) / _MAX
    tl.store(square_ptr + rows, scale * scale * factor, mask=rows < num_tokens)


@kernel("num_tokens")
def _add_layer_norm_fp8(
    x_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    out_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    live = cols < WIDTH
    mask = (rows < num_tokens) & live
    at = rows.to(tl.int64) * WIDTH + cols
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0).to(tl.float32)
    norm_bias = tl.load(norm_bias_ptr + cols, mask=live, other=0.0).to(tl.float32)
    total = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(bias_ptr + cols, mask=live, other=0.0).to(tl.float32)
    normed = layer_scaled(total, mask, eps, WIDTH) * weight + norm_bias
    tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=mask)
    store_fp8(normed, values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH)


@kernel("num_tokens")
def _silu_mul_fp8(
    gate_up_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_tokens) & (cols < WIDTH)
    at = rows.to(tl.int64) * (2 * WIDTH) + cols
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    store_fp8(gate * tl.sigmoid(gate) * up, values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH)


@kernel("num_tokens")
def _bias_gelu_fp8(
    x_ptr,
    bias_ptr,
    values_ptr,
    scale_ptr,
    num_tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    live = cols < WIDTH
    mask = (rows < num_tokens) & live
    x = tl.load(x_ptr + rows.to(tl.int64) * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + cols, mask=live, other=0.0).to(tl.float32)
    store_fp8(gelu(x), values_ptr, scale_ptr, rows, cols, num_tokens, WIDTH)


def quantize_rows(x: Tensor, out: Fp8Rows) -> None:
    """See rose.kernels.fp8.quantize_rows."""
    _launch_rows(_quantize_rows, (x,), out)


def add_rms_norm_fp8(x: Tensor, residual: Tensor, norm: RmsNorm, out: Fp8Rows) -> None:
    """See rose.kernels.fp8.add_rms_norm_fp8."""
    _launch_rows(_add_rms_norm_fp8, (x, residual, norm.weight), out, norm.eps)


def add_rms_norm_by_length(
    x: Tensor, residual: Tensor, norm: RmsNorm, out: Fp8Rows, square: ScaledSquare
) -> None:
    """See rose.kernels.fp8.add_rms_norm_by_length."""
    inputs = (x, residual, norm.weight, square.values)
    _launch_rows(_add_rms_norm_by_length, inputs, out, norm.eps, square.factor)


def add_layer_norm_fp8(x: Tensor, residual: Tensor, bias: Tensor, norm: LayerNorm, out: NormedRows) -> None:
    """See rose.kernels.fp8.add_layer_norm_fp8."""
    inputs = (x, residual, bias, norm.weight, norm.bias, out.rows)
    _launch_rows(_add_layer_norm_fp8, inputs, out.fp8, norm.eps)


def silu_mul_fp8(gate_up: Tensor, out: Fp8Rows) -> None:
    """See rose.kernels.fp8.silu_mul_fp8."""
    _launch_rows(_silu_mul_fp8, (gate_up,), out)


def bias_gelu_fp8(x: Tensor, bias: Tensor, out: Fp8Rows) -> None:
    """See rose.kernels.fp8.bias_gelu_fp8."""
    _launch_rows(_bias_gelu_fp8, (x, bias), out)


def _launch_rows(function: Any, tensors: tuple[Tensor, ...], out: Fp8Rows, *scalars: float) -> None:
    """Enqueue a kernel of (tensors, values, scale, T, scalars) whose programs take whole rows of `out`.

    A thread takes 16 elements of a row, what it stores at a time, and of long rows more.
    """
    num_tokens, width = out.values.shape
    block = block_of(width)
    rows = rows_a_program(num_tokens) if block <= 2048 else 1
    grid = (ceil_div(num_tokens, rows),)
    warps = min(max(rows * block // 512, 1), 16)
    sizes = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps}
    launch(function, grid, *tensors, out.values, out.scale, num_tokens, *scalars, **sizes)
