"""How every kernel here is declared and sized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's driver, loaded with the first kernel, is a module of this name and hides the package from then on.
import cuda_utils.errors  # noqa: F401
from rose.kernels.early import current

_compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)


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


@device_function
def wait_for_inputs(PDL: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """First thing in every kernel: wait for the one before, if it was launched early; PDL: an Early.

    The wait must come before any access to memory, also where nothing of the kernel before is read: that
    kernel may still be reading what this one overwrites. As every kernel waits, the one after cannot pass its
    own wait before this one and all before it are done. If that one fetches a weight meanwhile, it should be
    brought up at once: after this one's wait, 3.9 became 5.1 µs for QKV and rotation at 16 tokens.
    """
    if PDL == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL == 2:
        gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    """Enqueue `kernel` on the current stream; within `compiling` only see to it that it is compiled."""
    early = int(current())
    options = {"PDL": early, "launch_pdl": True} if early else {"PDL": 0}
    kernel.run(*arguments, grid=grid, warmup=_compile_only.get(), **constants, **options)


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Kernels launched inside are compiled for their arguments, `threads` at a time, and not run.

    A kernel takes 0.1 to 0.3 s the first time on a machine, milliseconds once Triton's disk cache has it.
    What fails to compile raises when it is launched in earnest.
    """
    token = _compile_only.set(True)
    try:
        with (
            ThreadPoolExecutor(threads, "triton-compile") as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            yield
    finally:
        _compile_only.reset(token)


def block_of(width: int) -> int:
    """The power of two that holds a row of `width` elements."""
    return 1 << (width - 1).bit_length()


def warps_for(elements: int) -> int:
    """Warps for a tile of bf16 `elements`: 8 of them (one 16-byte access) a thread, at most 8 warps."""
    return min(max(elements // 256, 1), 8)


def rows_a_program(programs: int) -> int:
    """Rows that each program takes where `programs` of them would take one each.

    Starting a program costs an H200 0.7 to 0.8 ns, whatever it does then: from 128 to 512 tokens a call grew
    by 0.81 ns a program of add_rms_norm (8 KB), 0.78 of silu_mul (6 KB), 0.69 of qk_norm_rope (4 KB). So they
    are about two a multiprocessor while that can be had; more than four rows a program hide nothing more.
    """
    return 1 if programs <= 264 else 2 if programs <= 528 else 4


def ceil_div(dividend: int, divisor: int) -> int:
    """dividend / divisor, rounded up."""
    return -(-dividend // divisor)
