"""Launches the kernels of skinny_gemm.cu on torch's current stream.

A launch allocates nothing on the device and may be captured into a CUDA graph. It carries the attribute of
programmatic dependent launch: the kernel comes up, and fetches its weight, while the one before still runs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch

from rose.kernels.cuda.cubin import SKINNY_GEMM
from rose.kernels.cuda.launch_config import clusters, early, launch_config
from rose.kernels.cuda.library import CudaLibrary, cuda_library
from rose.kernels.cuda.plan import CHUNK, SkinnyPlan, token_tile
from rose.kernels.cuda.views import gated_view, plain_view

if TYPE_CHECKING:
    from torch import Tensor


class SkinnyKernels:
    """The kernels of skinny_gemm.cu, compiled into `library`."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library
        driver = library.driver
        self._attributes = {1: [early(driver)], 2: [early(driver), clusters(driver, 2)]}

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
        attributes, shared_bytes = self._attributes[plan.cluster], plan.shared_bytes(m, k)
        driver, grid = self._library.driver, plan.grid(n)
        config = launch_config(driver, grid, plan.threads(), attributes, stream, shared_bytes)
        self._library.launch(plan.kernel(m), config, arguments)


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
