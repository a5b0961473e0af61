"""Elementwise over tiles of a few rows by some columns, as in activation.py."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.activation import gelu, launch_tiles
from rose.kernels.jit.compile import device_function, kernel, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor


@device_function
def gelu_by_tanh(x):
    """x * (1 + tanh(y)) / 2 with y = sqrt(2 / pi) (x + 0.044715 x^3), which is x * sigmoid(2 y)."""
    return x * tl.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x))


@kernel("num_tokens")
def _gelu_mul(
    gate_up_ptr,
    out_ptr,
    num_tokens,
    BY_TANH: tl.constexpr,
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
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    activated = gelu_by_tanh(gate) if BY_TANH else gelu(gate)
    result = activated * up
    out = out_ptr + rows.to(tl.int64) * WIDTH + cols
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)


def gelu_mul(gate_up: Tensor, out: Tensor, by_tanh: bool) -> None:
    """See rose.kernels.gated.gelu_mul."""
    launch_tiles(_gelu_mul, (gate_up,), out, BY_TANH=by_tanh)
