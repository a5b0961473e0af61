"""Elementwise over tiles of a few rows by some columns."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton.language as tl

from rose.kernels.jit.compile import (
    block_of,
    ceil_div,
    device_function,
    kernel,
    launch,
    rows_a_program,
    wait_for_inputs,
    warps_for,
)
from rose.kernels.jit.norm import load_sum, splits_of

if TYPE_CHECKING:
    from torch import Tensor

# Columns a program: 4 warps with one 16-byte access a thread, row and operand.
_COLUMNS = 1024


@device_function
def gelu(x):
    """x * Phi(x) = max(x, 0) - |x| * Phi(-|x|), with Phi(-|x|) = erfc(|x| / sqrt(2)) / 2 to 1e-7.

    libdevice's erf is two polynomials of which a warp computes both: with it, 51200 x 4096 elements took
    318 us on an H200, bound by instructions. This is 16 of them, an exp and a reciprocal included (by rsqrt:
    Triton's division is six).
    Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    size = tl.abs(x)
    root = tl.rsqrt(1.0 + 0.23164190 * size)
    t = root * root
    poly = t * (0.12741480 + t * (-0.14224837 + t * (0.71070687 + t * (-0.72657601 + t * 0.53070271))))
    return tl.maximum(x, 0.0) - size * poly * tl.exp2(-0.72134752 * x * x)


@kernel("num_tokens")
def _silu_mul(
    gate_up_ptr,
    out_ptr,
    num_tokens,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (rows < num_tokens) & (cols < WIDTH)
    at = rows.to(tl.int64) * (2 * WIDTH) + cols
    split_stride = tl.cast(num_tokens, tl.int64) * (2 * WIDTH)
    gate = load_sum(gate_up_ptr, at, mask, split_stride, SPLITS)
    up = load_sum(gate_up_ptr, at + WIDTH, mask, split_stride, SPLITS)
    result = gate * tl.sigmoid(gate) * up
    out = out_ptr + rows.to(tl.int64) * WIDTH + cols
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)


@kernel("num_tokens")
def _finish(
    x_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (rows < num_tokens) & (cols < WIDTH)
    at = rows.to(tl.int64) * WIDTH + cols
    x = load_sum(x_ptr, at, mask, tl.cast(num_tokens, tl.int64) * WIDTH, SPLITS)
    if HAS_BIAS:
        x += tl.load(bias_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    if GELU:
        x = gelu(x)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)


def launch_tiles(function: Any, inputs: tuple[Tensor, ...], out: Tensor, **constants: object) -> None:
    """Enqueue an elementwise kernel of (inputs, out, T) over tiles of `out` [T, WIDTH]."""
    num_tokens, width = out.shape
    block = min(block_of(width), _COLUMNS)
    rows = rows_a_program(num_tokens * ceil_div(width, block))
    grid = (ceil_div(num_tokens, rows), ceil_div(width, block))
    sizes = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps_for(block)}
    launch(function, grid, *inputs, out, num_tokens, **constants, **sizes)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See rose.kernels.activation.silu_mul."""
    launch_tiles(_silu_mul, (gate_up,), out, SPLITS=splits_of(gate_up))


def bias_gelu(x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See rose.kernels.activation.bias_gelu."""
    inputs = (x, x if bias is None else bias)
    launch_tiles(_finish, inputs, out, SPLITS=splits_of(x), HAS_BIAS=bias is not None, GELU=True)


def add_bias(x: Tensor, bias: Tensor, out: Tensor) -> None:
    """See rose.kernels.activation.add_bias."""
    launch_tiles(_finish, (x, bias), out, SPLITS=splits_of(x), HAS_BIAS=True, GELU=False)
