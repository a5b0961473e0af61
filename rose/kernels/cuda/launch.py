"""Launches the kernels of skinny_gemm.cu on torch's current stream, through the driver.

A launch allocates nothing on the device and may be captured into a CUDA graph. It carries the attribute of
programmatic dependent launch: the kernel comes up, and fetches its weight, while the one before still runs.
"""

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
from rose.kernels.cuda.cubin import find_cubin
from rose.kernels.cuda.plan import CHUNK, SHARED_BYTES, TILE_ROWS, SkinnyPlan, token_tile

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

CAPABILITY = (9, 0)
# A model has about 100 weights, and an activation as many maps as it has had numbers of rows.
_MAX_MAPS = 4096


class SkinnyKernels:
    """The kernels of one cubin, for one device. driver: cuda.bindings.driver, or a stand-in for it."""

    def __init__(self, cubin: Path, device_index: int, driver: Any) -> None:
        self._driver = driver
        self._device = check(driver.cuDeviceGet(device_index), "cuDeviceGet")
        loaded = driver.cuLibraryLoadFromFile(str(cubin).encode(), [], [], 0, [], [], 0)
        self._library = check(loaded, "cuLibraryLoadFromFile")
        self._kernel = functools.cache(self._find_kernel)
        self._map = functools.lru_cache(_MAX_MAPS)(self._encode_map)
        self._attributes = {cluster: self._launch_attributes(cluster) for cluster in (1, 2)}

    def launch(self, x: Tensor, weight: Tensor, plan: SkinnyPlan, out: Tensor, stream: int) -> None:
        """Enqueue out [splits, M, N] (or [M, N / 2] if plan.swiglu) = x [M, K] @ weight [N, K]ᵀ on `stream`.

        All bf16 and contiguous, at addresses that are multiples of 16 bytes; plan.fits(M, N, K).

        Raises:
            CudaError: the driver refused it.
        """
        (m, k), n = x.shape, len(weight)
        weight_map = self._map(*weight_view(weight.data_ptr(), n, k, plan.swiglu))
        x_map = self._map(x.data_ptr(), (k, m), (k * 2,), (CHUNK, token_tile(m) // plan.cluster))
        values = (
            ctypes.c_void_p(out.data_ptr()),
            *(ctypes.c_int(value) for value in (m, n, plan.chunks(k), plan.stages)),
        )
        pointers = (int(weight_map.getPtr()), int(x_map.getPtr()), *map(ctypes.addressof, values))
        parameters = (ctypes.c_void_p * len(pointers))(*pointers)
        config = self._config(plan, m, n, k)
        config.hStream = self._driver.CUstream(stream)
        kernel = self._kernel(plan.kernel(m))
        check(
            self._driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(parameters), 0), "cuLaunchKernelEx"
        )

    def _config(self, plan: SkinnyPlan, m: int, n: int, k: int) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY = plan.grid(n)
        config.blockDimX = plan.threads()
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = plan.shared_bytes(m, k)
        attributes = self._attributes[plan.cluster]
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _launch_attributes(self, cluster: int) -> list[Any]:
        names = self._driver.CUlaunchAttributeID
        early = self._driver.CUlaunchAttribute()
        early.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        if cluster == 1:
            return [early]
        together = self._driver.CUlaunchAttribute()
        together.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = together.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        return [early, together]

    def _find_kernel(self, name: str) -> Any:
        driver = self._driver
        kernel = check(driver.cuLibraryGetKernel(self._library, name.encode()), f"cuLibraryGetKernel {name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuKernelSetAttribute(limit, SHARED_BYTES, kernel, self._device), "cuKernelSetAttribute")
        return kernel

    def _encode_map(
        self, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> Any:
        """A tensor map; elements beyond the tensor read as zeros.

        It holds nothing but these numbers, and a launch copies it: kept maps stay right when the memory at an
        address is freed and given out again, and so do graphs that were captured with them.
        """
        driver, rank = self._driver, len(sizes)
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


def weight_view(
    address: int, n: int, k: int, gated: bool
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Address, sizes, strides in bytes and box of a weight [n, k], innermost first.

    gated: as [n / 16][2][8][k], so that a box has 8 rows of the gate, the same 8 of up, and so on.
    """
    if gated:
        return address, (k, 8, 2, n // 16), (k * 2, n * k, k * 16), (CHUNK, 8, 2, TILE_ROWS // 16)
    return address, (k, n), (k * 2,), (CHUNK, TILE_ROWS)


@functools.cache
def skinny_kernels() -> SkinnyKernels | None:
    """The kernels for torch's current device; None if it is no Hopper, or they are not built or unusable."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != CAPABILITY:
        return None
    cubin = find_cubin(default_folders())
    if cubin is None:
        log.info("no skinny_gemm kernels; build them with python -m rose.kernels.cuda.build")
        return None
    from cuda.bindings import driver

    torch.cuda.current_stream().synchronize()  # a context must exist
    try:
        return SkinnyKernels(cubin, torch.cuda.current_device(), driver)
    except DeviceError as error:
        log.warning("ignored %s: %s", cubin, error)
        return None


def skinny_gemm(x: Tensor, weight: Tensor, plan: SkinnyPlan, out: Tensor) -> None:
    """`SkinnyKernels.launch` on torch's current stream.

    Raises:
        RuntimeError: there are no kernels for this device.
    """
    kernels = skinny_kernels()
    if kernels is None:
        raise RuntimeError("the skinny_gemm kernels are not built; run python -m rose.kernels.cuda.build")
    kernels.launch(x, weight, plan, out, torch.cuda.current_stream().cuda_stream)
