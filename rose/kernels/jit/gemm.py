"""Products of few rows: the grid is over M, N and parts of K; rows are masked, N and K are whole tiles."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.activation import gelu
from rose.kernels.jit.compile import ceil_div, kernel, launch, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.gemm import GemmPlan


@kernel("m")
def _split_k_gemm(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    depth = split * (K // SPLITS) + tl.arange(0, BLOCK_K)
    live = (rows < m)[:, None]
    x_at = x_ptr + (rows.to(tl.int64) * K)[:, None] + depth[None, :]
    weight_at = weight_ptr + (cols * K)[None, :] + depth[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K // SPLITS, BLOCK_K):
        total = tl.dot(tl.load(x_at, mask=live, other=0.0), tl.load(weight_at), total)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols).to(tl.float32)[None, :]
    if GELU:
        total = gelu(total)
    at = (split.to(tl.int64) * m + rows)[:, None] * N + cols[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)


@kernel("m")
def _swiglu_gemm(
    x_ptr,
    weight_ptr,
    out_ptr,
    m,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # Two accumulators rather than interleaved columns: the weight stays as cuBLAS wants it for other shapes.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    live = (rows < m)[:, None]
    x_at = x_ptr + (rows.to(tl.int64) * K)[:, None] + depth[None, :]
    gate_at = weight_ptr + (cols * K)[None, :] + depth[:, None]
    up_at = gate_at + WIDTH * K
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K, BLOCK_K):
        x = tl.load(x_at, mask=live, other=0.0)
        gate = tl.dot(x, tl.load(gate_at), gate)
        up = tl.dot(x, tl.load(up_at), up)
        x_at += BLOCK_K
        gate_at += BLOCK_K
        up_at += BLOCK_K
    result = gate * tl.sigmoid(gate) * up
    at = (rows.to(tl.int64) * WIDTH)[:, None] + cols[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=live)


def split_k_gemm(x: Tensor, weight: Tensor, plan: GemmPlan, out: Tensor) -> None:
    """See rose.kernels.gemm.split_k_gemm."""
    _launch(x, weight, None, plan, out)


def bias_gemm(x: Tensor, weight: Tensor, bias: Tensor, plan: GemmPlan, out: Tensor) -> None:
    """See rose.kernels.gemm.bias_gemm."""
    _launch(x, weight, bias, plan, out)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan, out: Tensor) -> None:
    (m, k), n = x.shape, len(weight)
    launch(
        _split_k_gemm,
        (ceil_div(m, plan.block_m), n // plan.block_n, plan.splits),
        x,
        weight,
        weight if bias is None else bias,
        out,
        m,
        N=n,
        K=k,
        SPLITS=plan.splits,
        HAS_BIAS=bias is not None,
        GELU=plan.fused == "gelu",
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        num_stages=plan.stages,
        num_warps=plan.warps,
    )


def swiglu_gemm(x: Tensor, weight: Tensor, plan: GemmPlan, out: Tensor) -> None:
    """See rose.kernels.gemm.swiglu_gemm."""
    (m, k), width = x.shape, out.shape[1]
    launch(
        _swiglu_gemm,
        (ceil_div(m, plan.block_m), width // plan.block_n),
        x,
        weight,
        out,
        m,
        WIDTH=width,
        K=k,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        num_stages=plan.stages,
        num_warps=plan.warps,
    )
