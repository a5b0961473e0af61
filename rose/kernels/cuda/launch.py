"""Launches the kernels of skinny_gemm.cu on torch's current stream.

A launch allocates nothing on the device and may be captured into a CUDA graph. It carries the attribute of
programmatic dependent launch: the kernel comes up, and fetches its weight, while the one before still runs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

from rose.kernels.cuda.cubin import SKINNY_GEMM
from rose.kernels.cuda.library import CudaLibrary, cuda_library
from rose.kernels.cuda.plan import CHUNK, SkinnyPlan, token_tile
from rose.kernels.cuda.views import gated_view, plain_view

if TYPE_CHECKING:
    from torch import Tensor


class SkinnyKernels:
    """The kernels of skinny_gemm.cu, compiled into `library`."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library
        self._attributes = {cluster: self._launch_attributes(cluster) for cluster in (1, 2)}

    def launch(self, x: Tensor, weight: Tensor, plan: SkinnyPlan, out: Tensor, stream: int) -> None:
        """Enqueue out [splits, M, N] (or [M, N / 2] if plan.swiglu) = x [M, K] @ weight [N, K]ᵀ on `stream`.

        All bf16 and contiguous, at addresses that are multiples of 16 bytes; plan.fits(M, N, K).

        Raises:
            CudaError: the driver refused it.
        """
        (m, k), n = x.shape, len(weight)
        view = gated_view if plan.swiglu else plain_view
        weight_map = self._library.tensor_map(*view(weight.data_ptr(), n, k))
        x_map = self._library.tensor_map(
            x.data_ptr(), (k, m), (k * 2,), (CHUNK, token_tile(m) // plan.cluster)
        )
        numbers = (ctypes.c_int(value) for value in (m, n, plan.chunks(k), plan.stages))
        arguments = (weight_map, x_map, ctypes.c_void_p(out.data_ptr()), *numbers)
        config = self._config(plan, m, n, k)
        config.hStream = self._library.driver.CUstream(stream)
        self._library.launch(plan.kernel(m), config, arguments)

    def _config(self, plan: SkinnyPlan, m: int, n: int, k: int) -> Any:
        config = self._library.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY = plan.grid(n)
        config.blockDimX = plan.threads()
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = plan.shared_bytes(m, k)
        attributes = self._attributes[plan.cluster]
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _launch_attributes(self, cluster: int) -> list[Any]:
        driver = self._library.driver
        names = driver.CUlaunchAttributeID
        early = driver.CUlaunchAttribute()
        early.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        if cluster == 1:
            return [early]
        together = driver.CUlaunchAttribute()
        together.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = together.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        return [early, together]


@functools.cache
def skinny_kernels() -> SkinnyKernels | None:
    """The kernels for torch's current device; None as of `cuda_library`."""
    library = cuda_library(SKINNY_GEMM)
    return None if library is None else SkinnyKernels(library)


def skinny_gemm(x: Tensor, weight: Tensor, plan: SkinnyPlan, out: Tensor) -> None:
    """`SkinnyKernels.launch` on torch's current stream.

    Raises:
        RuntimeError: there are no kernels for this device.
    """
    kernels = skinny_kernels()
    if kernels is None:
        raise RuntimeError("the skinny_gemm kernels are not built; run python -m rose.kernels.cuda.build")
    kernels.launch(x, weight, plan, out, torch.cuda.current_stream().cuda_stream)
