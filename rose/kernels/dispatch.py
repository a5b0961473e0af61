"""Whether an operation runs as a Triton kernel or in plain PyTorch, and how Triton kernels are launched."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# Programmatic dependent launch (Hopper and later): a kernel is brought up while the one before it still runs.
programmatic: ContextVar[bool] = ContextVar("programmatic", default=False)


@contextmanager
def early_launches(wanted: bool) -> Iterator[None]:
    """Triton kernels launched inside are launched early, if `wanted` or if they are anyway."""
    token = programmatic.set(wanted or programmatic.get())
    try:
        yield
    finally:
        programmatic.reset(token)


def uses_triton(x: torch.Tensor) -> bool:
    """True for tensors on a GPU where Triton is installed; the plain versions allocate, Triton never does."""
    return x.is_cuda and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
