"""The one place where device and torch errors become engine errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from cuda_utils.errors import CUDA_OUT_OF_MEMORY, STICKY_CUDA_ERRORS, CudaError, DeviceError
from rose.batch import BatchResult
from rose.errors import EngineDeadError, EngineError, OutOfMemoryError, StepError

# torch says it in a plain RuntimeError, without a type of its own.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def as_engine_error(error: Exception) -> EngineError:
    """The engine error that `error`, raised while a step was launched or ran, stands for.

    A new one always: raised from itself, an error would be its own cause, and stay until the collector runs.
    """
    if isinstance(error, EngineError):
        return type(error)(*error.args)
    if _is_sticky(error):
        return EngineDeadError(f"the device can run no further step: {error}")
    if _is_out_of_memory(error):
        return OutOfMemoryError(f"too little memory for this step: {error}")
    return StepError(f"the step failed: {error!r}")


def marked(result: BatchResult) -> BatchResult:
    """`result`, and which of its rows hold a NaN or an infinity. 10 µs at 100 × 1024 if none does.

    1 µs if their squares are known, which are finite unless a value is not, or near 1e19.
    """
    vectors, squares = result.vectors, result.squares
    if squares is not None and math.isfinite(sum(squares.tolist())):
        return result
    # Of one vector the sum of squares takes half the time that a look at each value does.
    if len(vectors) == 1 and math.isfinite(np.vdot(vectors, vectors)):
        return result
    finite = np.isfinite(vectors)
    if finite.all():
        return result
    return replace(result, non_finite=tuple(np.flatnonzero(~finite.all(axis=1)).tolist()))


def _is_sticky(error: Exception) -> bool:
    return error.sticky if isinstance(error, DeviceError) else _cuda_code(error) in STICKY_CUDA_ERRORS


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error):
        return True
    return _cuda_code(error) == CUDA_OUT_OF_MEMORY


def _cuda_code(error: Exception) -> int | None:
    """The cudaError_t that CUDA, or torch by a torch.AcceleratorError, met first."""
    return error.value if isinstance(error, CudaError) else getattr(error, "error_code", None)
