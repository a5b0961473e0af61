"""Errors of the device, and whether they outlive the call that reported them."""

from __future__ import annotations

from typing import Any

CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

# After these the context is lost: every later call fails too, only a new process helps.
# Source: CUDA Runtime API, cudaError_t ("the process must be terminated and relaunched").
# The driver's CUresult has the same values.
STICKY_CUDA_ERRORS = frozenset(
    {
        4,  # cudaErrorCudartUnloading
        46,  # cudaErrorDevicesUnavailable
        214,  # cudaErrorECCUncorrectable
        220,  # cudaErrorNvlinkUncorrectable
        226,  # cudaErrorContained
        700,  # cudaErrorIllegalAddress
        702,  # cudaErrorLaunchTimeout
        709,  # cudaErrorContextIsDestroyed
        710,  # cudaErrorAssert
        714,  # cudaErrorHardwareStackError
        715,  # cudaErrorIllegalInstruction
        716,  # cudaErrorMisalignedAddress
        717,  # cudaErrorInvalidAddressSpace
        718,  # cudaErrorInvalidPc
        719,  # cudaErrorLaunchFailure
        721,  # cudaErrorTensorMemoryLeak
        999,  # cudaErrorUnknown
    }
)


class DeviceError(RuntimeError):
    """The device, or the CPU worker that stands in for it, reported an error.

    sticky: whether everything after it fails too.
    """

    def __init__(self, message: str, *, sticky: bool) -> None:
        super().__init__(message)
        self.sticky = sticky


class CudaError(DeviceError):
    """A CUDA call failed. `name` and `value`: of its cudaError_t or CUresult. `call`: the function."""

    def __init__(self, error: Any, call: str) -> None:
        self.value = int(error)
        self.name: str = getattr(error, "name", f"error {self.value}")
        self.call = call
        super().__init__(f"{call}: {self.name} ({self.value})", sticky=self.value in STICKY_CUDA_ERRORS)


def check(result: tuple[Any, ...], call: str) -> Any:
    """Return what a cuda-python call gave besides its status.

    result: (status,) or (status, value).

    Raises:
        CudaError: the status is not 0.
    """
    if result[0]:
        raise CudaError(result[0], call)
    return result[1] if len(result) > 1 else None
