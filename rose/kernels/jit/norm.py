"""A program takes a few rows: loads them once, keeps them in registers, stores them once."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.norm import LayerNorm, RmsNorm


@device_function
def load_sum(x_ptr, at, mask, split_stride, SPLITS: tl.constexpr):
    """fp32 sum of SPLITS partials, split_stride elements apart; the loads do not wait for each other."""
    total = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(x_ptr + split * split_stride + at, mask=mask, other=0.0).to(tl.float32)
    return total


@device_function
def rms_scaled(x, eps, HIDDEN: tl.constexpr):
    """x / sqrt(mean(x²) + eps) along the last axis; masked lanes of x must be zero."""
    mean_square = tl.sum(x * x, axis=len(x.shape) - 1, keep_dims=True) / HIDDEN
    return x * tl.rsqrt(mean_square + eps)


@device_function
def layer_scaled(x, mask, eps, HIDDEN: tl.constexpr):
    """(x - mean) / sqrt(variance + eps) along the last axis; two passes over registers: nothing cancels."""
    centred = tl.where(mask, x - tl.sum(x, axis=len(x.shape) - 1, keep_dims=True) / HIDDEN, 0.0)
    variance = tl.sum(centred * centred, axis=len(x.shape) - 1, keep_dims=True) / HIDDEN
    return centred * tl.rsqrt(variance + eps)


@kernel("num_tokens")
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    eps,
    SPLITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_tokens) & (cols < HIDDEN)
    at = rows.to(tl.int64) * HIDDEN + cols
    weight = tl.load(weight_ptr + cols, mask=cols < HIDDEN, other=0.0).to(tl.float32)
    total = load_sum(x_ptr, at, mask, tl.cast(num_tokens, tl.int64) * HIDDEN, SPLITS)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), mask=mask)
    normed = rms_scaled(total, eps, HIDDEN) * weight
    tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=mask)


@kernel("num_tokens")
def _add_layer_norm(
    x_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    norm_bias_ptr,
    out_ptr,
    num_tokens,
    eps,
    SPLITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    live = cols < HIDDEN
    mask = (rows < num_tokens) & live
    at = rows.to(tl.int64) * HIDDEN + cols
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0).to(tl.float32)
    norm_bias = tl.load(norm_bias_ptr + cols, mask=live, other=0.0).to(tl.float32)
    total = load_sum(x_ptr, at, mask, tl.cast(num_tokens, tl.int64) * HIDDEN, SPLITS)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=live, other=0.0).to(tl.float32)
    if KEEPS_SUM:
        tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), mask=mask)
    normed = layer_scaled(total, mask, eps, HIDDEN) * weight + norm_bias
    tl.store(out_ptr + at, normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, norm: RmsNorm, out: Tensor) -> None:
    """See rose.kernels.norm.rms_norm."""
    _launch_rms_norm(x, None, norm, out)


def add_rms_norm(x: Tensor | None, residual: Tensor, norm: RmsNorm, out: Tensor) -> None:
    """See rose.kernels.norm.add_rms_norm."""
    if x is None:
        _launch_rms_norm(residual, None, norm, out)
    else:
        _launch_rms_norm(x, residual, norm, out)


def _launch_rms_norm(x: Tensor, residual: Tensor | None, norm: RmsNorm, out: Tensor) -> None:
    num_tokens, hidden = out.shape
    block, rows = block_of(hidden), rows_a_program(num_tokens)
    launch(
        _rms_norm,
        (ceil_div(num_tokens, rows),),
        x,
        x if residual is None else residual,
        norm.weight,
        out,
        num_tokens,
        norm.eps,
        SPLITS=splits_of(x),
        HAS_RESIDUAL=residual is not None,
        HIDDEN=hidden,
        BLOCK=block,
        ROWS=rows,
        num_warps=warps_for(block),
    )


def add_layer_norm(
    x: Tensor | None, residual: Tensor, bias: Tensor | None, norm: LayerNorm, out: Tensor
) -> None:
    """See rose.kernels.norm.add_layer_norm."""
    _launch_layer_norm(x, residual, bias, norm, out, keeps_sum=False)


def add_pre_layer_norm(
    x: Tensor, residual: Tensor, bias: Tensor | None, norm: LayerNorm, out: Tensor
) -> None:
    """See rose.kernels.norm.add_pre_layer_norm."""
    _launch_layer_norm(x, residual, bias, norm, out, keeps_sum=True)


def _launch_layer_norm(
    x: Tensor | None, residual: Tensor, bias: Tensor | None, norm: LayerNorm, out: Tensor, keeps_sum: bool
) -> None:
    num_tokens, hidden = out.shape
    block, rows = block_of(hidden), rows_a_program(num_tokens)
    launch(
        _add_layer_norm,
        (ceil_div(num_tokens, rows),),
        residual if x is None else x,
        residual,
        norm.bias if bias is None else bias,
        norm.weight,
        norm.bias,
        out,
        num_tokens,
        norm.eps,
        SPLITS=1 if x is None else splits_of(x),
        HAS_RESIDUAL=x is not None,
        HAS_BIAS=bias is not None,
        KEEPS_SUM=keeps_sum,
        HIDDEN=hidden,
        BLOCK=block,
        ROWS=rows,
        num_warps=warps_for(block),
    )


def splits_of(x: Tensor) -> int:
    """K of partial sums [K, T, N]; 1 of a plain [T, N]."""
    return x.shape[0] if x.dim() == 3 else 1
