"""A copy to an address that is read on the device, and the rows' squares behind it."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import ceil_div, kernel, launch, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# Words a program takes at a time, 8 or 32 a thread. Wide rows are SPLADE's, a number for each word there is.
_BLOCK, _WIDE_BLOCK = 1024, 8192


@kernel("address_ptr", "width", "num_words", "share")
def _deliver(address_ptr, words_ptr, width, num_words, share, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    address = tl.load(address_ptr)
    live = address != 0
    out_ptr = address.to(tl.pointer_type(tl.int32))
    row, rows = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    done = 0
    while done < width:
        mask = live & (done + cols < width)
        at = row * width + done + cols
        words = tl.load(words_ptr + at, mask=mask, other=0)
        tl.store(out_ptr + at, words, mask=mask)
        values = words.to(tl.float32, bitcast=True)
        squares += values * values
        done += BLOCK
    tl.store(address.to(tl.pointer_type(tl.float32)) + num_words + row, tl.sum(squares, axis=0), mask=live)
    done = 0
    while done < share:
        at = rows * width + row * share + done + cols
        mask = live & (done + cols < share) & (at < num_words)
        tl.store(out_ptr + at, tl.load(words_ptr + at, mask=mask, other=0), mask=mask)
        done += BLOCK


def deliver(address: Tensor, words: Tensor, vectors: tuple[int, int]) -> None:
    """See rose.kernels.delivery.deliver."""
    rows, width = vectors
    share = ceil_div(len(words) - rows * width, rows)
    block, warps = (_BLOCK, 4) if width <= 4 * _BLOCK else (_WIDE_BLOCK, 8)
    launch(_deliver, (rows,), address, words, width, len(words), share, BLOCK=block, num_warps=warps)
