"""Whether an operation runs as a Triton kernel or in plain PyTorch."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def uses_triton(x: torch.Tensor) -> bool:
    """True for tensors on a GPU where Triton is installed; the plain versions allocate, Triton never does."""
    return x.is_cuda and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
