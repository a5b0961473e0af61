"""How every kernel here is declared and sized."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.driver import driver

from rose.kernels.driver import start_triton
from rose.kernels.early import current
from rose.kernels.jit.prebuilt import PrebuiltFunction, PrebuiltKernel

log = logging.getLogger(__name__)

if torch.cuda.is_available():
    start_triton()

# What `compiling` has met so far, by identity, where only that is wanted of a launch.
_variants: ContextVar[dict[int, Any] | None] = ContextVar("variants", default=None)


def kernel(*unspecialized: str) -> Callable[[Callable[..., None]], Any]:
    """triton.jit of a kernel that may have been built ahead; `unspecialized` arguments start no compilation.

    Triton compiles one variant for integers that are 1, multiples of 16 and others, and for pointers that are
    16-byte aligned and others; token counts and slices of staging buffers take all of these while serving.
    """
    names = list(unspecialized)
    rules = {"do_not_specialize": names, "do_not_specialize_on_alignment": names}
    if triton.knobs.runtime.interpret:
        interpreted: Callable[[Callable[..., None]], Any] = triton.jit(**rules)
        return interpreted
    return lambda function: PrebuiltFunction(function, **rules)


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
    variants = _variants.get()
    variant = kernel.run(*arguments, grid=grid, warmup=variants is not None, **constants, **options)
    if variants is not None:
        variants[id(variant)] = variant


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Kernels launched inside are made ready for their arguments, `threads` at a time, and not run.

    A variant that was not built ahead takes 0.1 to 0.3 s the first time on a machine, milliseconds once
    Triton's disk cache has it; so does the C module by which Triton launches kernels of one signature.
    What fails to compile raises when it is launched in earnest.
    """
    started = time.perf_counter()
    variants: dict[int, Any] = {}
    token = _variants.set(variants)
    try:
        with ThreadPoolExecutor(threads, "triton-compile") as pool:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
            _make_launchers(pool, variants.values())
    finally:
        _variants.reset(token)
    built = sum(isinstance(variant, PrebuiltKernel) for variant in variants.values())
    compiled, seconds = len(variants) - built, time.perf_counter() - started
    log.info("Triton kernels: %d built ahead, %d compiled or cached, %.1f s", built, compiled, seconds)


def _make_launchers(pool: ThreadPoolExecutor, variants: Iterable[Any]) -> None:
    """Have Triton compile the C module of every signature, which it would do one by one at first launches."""
    unlike: dict[tuple[object, ...], Any] = {}
    for variant in variants:
        with suppress(Exception):  # it failed to compile
            kernel = variant.result() if hasattr(variant, "result") else variant
            unlike.setdefault(tuple(kernel.src.signature.values()), kernel)
    made = [
        pool.submit(driver.active.launcher_cls, kernel.src, kernel.metadata) for kernel in unlike.values()
    ]
    for module in made:
        module.exception()  # raised again by the first launch


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
