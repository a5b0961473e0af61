"""Launches chained_attention.cu: ragged attention of packed sequences on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rose.kernels.cuda.plan import CHUNK, SHARED_BYTES
from rose.kernels.early import Early, current

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.library import CudaLibrary
    from rose.kernels.cuda.views import View

_THREADS, _TILE_ROWS = 384, 128


class ChainedKernels:
    """The kernels of chained_attention.cu, compiled into `library`; one for each size of a head.

    causal: whether a token sees only itself and earlier ones of its sequence.
    """

    def __init__(self, library: CudaLibrary, *, causal: bool) -> None:
        self._library = library
        self._name = "chained_attention_causal" if causal else "chained_attention"
        early = library.driver.CUlaunchAttribute()
        names = library.driver.CUlaunchAttributeID
        early.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        self._early = [early]

    def launch(
        self,
        qkv: Sequence[Tensor],
        out: Tensor,
        works: tuple[Tensor, int],
        blocks: int,
        scale: float,
        stream: int,
    ) -> None:
        """Enqueue the attention of a batch on `stream`, early as `launching` says; may be captured.

        qkv, out: as of AttentionBackend.forward, bf16, rows and starts at multiples of 16 bytes. works: an
        Fa3List of such attention for `blocks` blocks with tiles of 128 rows, and its capacity. scale: on q·k,
        to base 2.

        Raises:
            CudaError: the driver refused it.
        """
        q, k, _ = qkv
        maps = [self._library.tensor_map(*_heads_view(x)) for x in qkv]
        memory, capacity = works
        numbers = (
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.stride(0)),
            ctypes.c_void_p(memory.data_ptr()),
            ctypes.c_int(capacity),
            ctypes.c_int(q.shape[1] // k.shape[1]),
            ctypes.c_float(scale),
        )
        kernel = f"{self._name}_{q.shape[2]}"
        self._library.launch(kernel, self._config(blocks, stream), (*maps, *numbers))

    def _config(self, blocks: int, stream: int) -> Any:
        driver = self._library.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.blockDimX = blocks, _THREADS
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = SHARED_BYTES
        attributes = [] if current() is Early.NO else self._early
        config.attrs, config.numAttrs = attributes, len(attributes)
        config.hStream = driver.CUstream(stream)
        return config


def _heads_view(x: Tensor) -> View:
    """x [T, H, D], whose rows may be strided, as the copy engine sees it: boxes of 64 columns, 128 rows."""
    num_rows, heads, dim = x.shape
    row = x.stride(0) * x.element_size()
    return x.data_ptr(), (heads * dim, num_rows), (row,), (CHUNK, _TILE_ROWS)
