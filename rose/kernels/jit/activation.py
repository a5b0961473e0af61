"""Elementwise over tiles of one row."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import block_of, ceil_div, kernel, launch, wait_for_inputs, warps_for
from rose.kernels.jit.norm import load_sum, splits_of

if TYPE_CHECKING:
    from torch import Tensor

# Columns a program: 4 warps with one 16-byte access a thread and operand.
_COLUMNS = 1024


@kernel("num_tokens")
def _silu_mul(
    gate_up_ptr,
    out_ptr,
    num_tokens,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    at = row * (2 * WIDTH) + cols
    split_stride = tl.cast(num_tokens, tl.int64) * (2 * WIDTH)
    gate = load_sum(gate_up_ptr, at, mask, split_stride, SPLITS)
    up = load_sum(gate_up_ptr, at + WIDTH, mask, split_stride, SPLITS)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + cols, result.to(out_ptr.dtype.element_ty), mask=mask)


@kernel()
def _bias_gelu(
    x_ptr,
    bias_ptr,
    out_ptr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + cols
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See rose.kernels.activation.silu_mul."""
    num_tokens, width = out.shape
    block = min(block_of(width), _COLUMNS)
    launch(
        _silu_mul,
        (num_tokens, ceil_div(width, block)),
        gate_up,
        out,
        num_tokens,
        SPLITS=splits_of(gate_up),
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_for(block),
    )


def bias_gelu(x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See rose.kernels.activation.bias_gelu."""
    num_tokens, width = out.shape
    block = min(block_of(width), _COLUMNS)
    launch(
        _bias_gelu,
        (num_tokens, ceil_div(width, block)),
        x,
        x if bias is None else bias,
        out,
        HAS_BIAS=bias is not None,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_for(block),
    )
