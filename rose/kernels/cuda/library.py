"""Kernels of a cubin on one device: launches and tensor maps, through the driver."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cuda_utils.errors import DeviceError, check
from rose.aot.folders import default_folders
from rose.kernels.cuda.cubin import CudaSource, find_cubin
from rose.kernels.cuda.plan import SHARED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

CAPABILITY = (9, 0)
# A model has about 100 weights, and an activation as many maps as it has had numbers of rows.
_MAX_MAPS = 4096


class CudaLibrary:
    """The kernels of one cubin, for one device. driver: cuda.bindings.driver, or a stand-in for it.

    kernel(name): its CUkernel, found once. tensor_map(address, sizes, strides, box): a CUtensorMap of bf16,
    innermost dimension first, sizes and box in elements, strides in bytes, of all dimensions but the first.
    """

    def __init__(self, cubin: Path, device_index: int, driver: Any) -> None:
        self.driver = driver
        self.device = check(driver.cuDeviceGet(device_index), "cuDeviceGet")
        loaded = driver.cuLibraryLoadFromFile(str(cubin).encode(), [], [], 0, [], [], 0)
        self._library = check(loaded, "cuLibraryLoadFromFile")
        self.kernel: Callable[[str], Any] = functools.cache(self._find_kernel)
        self.tensor_map: Callable[..., Any] = functools.lru_cache(_MAX_MAPS)(self._encode_map)

    def launch(self, kernel: str, config: Any, arguments: Sequence[Any]) -> None:
        """Enqueue `kernel` as the CUlaunchConfig says, with its stream.

        arguments: tensor maps, or ctypes objects, which are copied.

        Raises:
            CudaError: the driver refused it.
        """
        pointers = [
            int(value.getPtr()) if hasattr(value, "getPtr") else ctypes.addressof(value)
            for value in arguments
        ]
        parameters = (ctypes.c_void_p * len(pointers))(*pointers)
        launched = self.driver.cuLaunchKernelEx(config, self.kernel(kernel), ctypes.addressof(parameters), 0)
        check(launched, "cuLaunchKernelEx")

    def _find_kernel(self, name: str) -> Any:
        driver = self.driver
        kernel = check(driver.cuLibraryGetKernel(self._library, name.encode()), f"cuLibraryGetKernel {name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuKernelSetAttribute(limit, SHARED_BYTES, kernel, self.device), "cuKernelSetAttribute")
        return kernel

    def _encode_map(
        self, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> Any:
        """Elements beyond the tensor read as zeros.

        It holds nothing but these numbers, and a launch
        copies it: kept maps stay right when the memory at an address is freed and given out again, and so do
        graphs that were captured with them.
        """
        driver, rank = self.driver, len(sizes)
        encoded = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            rank,
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return check(encoded, "cuTensorMapEncodeTiled")


@functools.cache
def cuda_library(source: CudaSource, folders: tuple[Path, ...] | None = None) -> CudaLibrary | None:
    """Its kernels for torch's current device; None if it is no Hopper, or they are not built or unusable.

    folders: where they may be, if not in the usual ones.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != CAPABILITY:
        return None
    cubin = find_cubin(source, default_folders() if folders is None else folders)
    if cubin is None:
        log.info("no kernels of %s; build them with python -m rose.kernels.cuda.build", source.path.name)
        return None
    from cuda.bindings import driver

    torch.cuda.current_stream().synchronize()  # a context must exist
    try:
        return CudaLibrary(cubin, torch.cuda.current_device(), driver)
    except DeviceError as error:
        log.warning("ignored %s: %s", cubin, error)
        return None
