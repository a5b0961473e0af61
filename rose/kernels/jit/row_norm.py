"""A program takes 256 rows; their few partial sums are one load each."""

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
    wait_for_inputs,
)

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 256


@device_function
def row_sums(sums_ptr, rows, live, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of PARTS numbers a row."""
    parts = tl.arange(0, BLOCK)
    mask = live[:, None] & (parts < PARTS)[None, :]
    at = rows.to(tl.int64)[:, None] * PARTS + parts[None, :]
    return tl.sum(tl.load(sums_ptr + at, mask=mask, other=0.0), axis=1)


@kernel("sums_ptr", "scale_ptr", "offset_ptr", "num_rows")
def _row_norm(
    sums_ptr,
    scale_ptr,
    offset_ptr,
    num_rows,
    width,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    mean = row_sums(sums_ptr, rows, live, PARTS, BLOCK) / width
    squares_ptr = sums_ptr + tl.cast(num_rows, tl.int64) * PARTS
    square = row_sums(squares_ptr, rows, live, PARTS, BLOCK) / width
    scale = tl.rsqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    tl.store(scale_ptr + rows, scale, mask=live)
    tl.store(offset_ptr + rows, -mean * scale, mask=live)


def row_norm(sums: Tensor, width: int, eps: float, scale: Tensor, offset: Tensor) -> None:
    """See rose.kernels.row_norm.row_norm."""
    _, num_rows, parts = sums.shape
    launch(
        _row_norm,
        (ceil_div(num_rows, _ROWS),),
        sums,
        scale,
        offset,
        num_rows,
        width,
        eps,
        PARTS=parts,
        BLOCK=block_of(parts),
        ROWS=_ROWS,
        num_warps=4,
    )
