"""How every kernel here is declared and sized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def kernel(*unspecialized: str) -> Callable[[Callable[..., None]], Any]:
    """triton.jit whose `unspecialized` arguments never start another compilation.

    Triton compiles one variant for integers that are 1, multiples of 16 and others, and for pointers that are
    16-byte aligned and others; token counts and slices of staging buffers take all of these while serving.
    """
    names = list(unspecialized)
    decorate: Callable[[Callable[..., None]], Any] = triton.jit(
        do_not_specialize=names, do_not_specialize_on_alignment=names
    )
    return decorate


def device_function(function: Callable[..., Any]) -> Any:
    """triton.jit for a function that kernels call."""
    return triton.jit(function)


def block_of(width: int) -> int:
    """The power of two that holds a row of `width` elements."""
    return 1 << (width - 1).bit_length()


def warps_for(elements: int) -> int:
    """Warps for a tile of bf16 `elements`: 8 of them (one 16-byte access) a thread, at most 8 warps."""
    return min(max(elements // 256, 1), 8)


def ceil_div(dividend: int, divisor: int) -> int:
    """dividend / divisor, rounded up."""
    return -(-dividend // divisor)
