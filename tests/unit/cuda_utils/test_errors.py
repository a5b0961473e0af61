"""CUDA statuses become typed errors that say whether anything can still run."""

from __future__ import annotations

import pytest
from cuda.bindings import runtime

from cuda_utils.errors import STICKY_CUDA_ERRORS, CudaError, check

STATUS = runtime.cudaError_t


def test_success_gives_the_value() -> None:
    assert check((STATUS.cudaSuccess, 7), "cudaHostAlloc") == 7
    assert check((STATUS.cudaSuccess,), "cudaEventRecord") is None


def test_an_error_names_the_call_and_itself() -> None:
    with pytest.raises(CudaError, match=r"cudaHostAlloc: cudaErrorMemoryAllocation \(2\)") as caught:
        check((STATUS.cudaErrorMemoryAllocation, None), "cudaHostAlloc")
    assert (caught.value.name, caught.value.value) == ("cudaErrorMemoryAllocation", 2)
    assert not caught.value.sticky


@pytest.mark.parametrize(
    "name",
    [
        "cudaErrorIllegalAddress",
        "cudaErrorLaunchFailure",
        "cudaErrorMisalignedAddress",
        "cudaErrorAssert",
        "cudaErrorECCUncorrectable",
        "cudaErrorHardwareStackError",
    ],
)
def test_errors_that_lose_the_context_are_sticky(name: str) -> None:
    assert CudaError(getattr(STATUS, name), "cudaEventQuery").sticky


def test_every_sticky_value_is_one_that_cuda_defines() -> None:
    assert {int(status) for status in STATUS} >= STICKY_CUDA_ERRORS
    refused_launch = {STATUS.cudaErrorInvalidConfiguration, STATUS.cudaErrorLaunchOutOfResources}
    assert not STICKY_CUDA_ERRORS & {int(status) for status in refused_launch}
