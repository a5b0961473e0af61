"""A copy over tiles of a few rows by some columns, which reads no padded row."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import (
    block_of,
    ceil_div,
    kernel,
    launch,
    rows_a_program,
    wait_for_inputs,
    warps_for,
)

if TYPE_CHECKING:
    from torch import Tensor

# Columns a program: 4 warps with one 16-byte access a thread and row.
_COLUMNS = 1024


@kernel("cu_seqlens_ptr", "num_tokens", "num_seqs")
def _copy_real_rows(
    source_ptr,
    cu_seqlens_ptr,
    out_ptr,
    num_tokens,
    num_seqs,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (rows < num_tokens) & (cols < WIDTH)
    real = mask & (rows < tl.load(cu_seqlens_ptr + num_seqs))
    at = rows.to(tl.int64) * WIDTH + cols
    tl.store(out_ptr + at, tl.load(source_ptr + at, mask=real, other=0.0), mask=mask)


def copy_real_rows(source: Tensor, cu_seqlens: Tensor, out: Tensor) -> None:
    """See rose.kernels.rows.copy_real_rows."""
    num_tokens = len(out)
    width = out.numel() // num_tokens
    block = min(block_of(width), _COLUMNS)
    rows = rows_a_program(num_tokens * ceil_div(width, block))
    launch(
        _copy_real_rows,
        (ceil_div(num_tokens, rows), ceil_div(width, block)),
        source,
        cu_seqlens,
        out,
        num_tokens,
        len(cu_seqlens) - 1,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        num_warps=warps_for(block),
    )
