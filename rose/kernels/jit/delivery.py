"""A copy to an address that is read on the device."""

# Triton kernels: parameters have no Python types, and compile-time constants are capitals as in Triton's own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from rose.kernels.jit.compile import ceil_div, kernel, launch, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

# Words a program: 4 warps, 8 words a thread.
_BLOCK = 1024


@kernel("address_ptr", "num_words")
def _deliver(address_ptr, words_ptr, num_words, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    address = tl.load(address_ptr)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < num_words) & (address != 0)
    words = tl.load(words_ptr + at, mask=mask, other=0)
    tl.store(address.to(tl.pointer_type(tl.int32)) + at, words, mask=mask)


def deliver(address: Tensor, words: Tensor) -> None:
    """See rose.kernels.delivery.deliver."""
    grid = (ceil_div(len(words), _BLOCK),)
    launch(_deliver, grid, address, words, len(words), BLOCK=_BLOCK, num_warps=4)
