"""A program takes 256 rows; their few partial sums are one load each."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import block_of, ceil_div, kernel, launch, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 256


@kernel("sums_ptr", "out_ptr", "num_rows")
def _row_scale(
    sums_ptr,
    out_ptr,
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
    parts = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (parts < PARTS)[None, :]
    sums = tl.load(sums_ptr + rows[:, None] * PARTS + parts[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + rows, tl.rsqrt(tl.sum(sums, axis=1) / width + eps), mask=rows < num_rows)


def row_scale(sums: Tensor, width: int, eps: float, out: Tensor) -> None:
    """See rose.kernels.row_scale.row_scale."""
    num_rows, parts = sums.shape
    launch(
        _row_scale,
        (ceil_div(num_rows, _ROWS),),
        sums,
        out,
        num_rows,
        width,
        eps,
        PARTS=parts,
        BLOCK=block_of(parts),
        ROWS=_ROWS,
        num_warps=4,
    )
