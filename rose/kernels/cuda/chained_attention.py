"""Launches chained_attention.cu: ragged attention of packed sequences on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.kernels.cuda.launch_config import clusters, early, launch_config
from rose.kernels.cuda.plan import CHUNK
from rose.kernels.early import Early, current

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.library import CudaLibrary
    from rose.kernels.cuda.views import View

# Query rows of a work, which are also the key rows of a tile; threads of a block.
TILE_ROWS, _THREADS = 128, 384


@dataclass(frozen=True, slots=True)
class ListedWorks:
    """An Fa3List in device memory, with tiles of 128 rows.

    capacity: the list's own. blocks: those of the list, or twice as many where pairs of them have one part.
    """

    memory: Tensor
    capacity: int
    blocks: int


class ChainedKernels:
    """The kernels of chained_attention.cu, compiled into `library`; one for each size of a head.

    causal: whether a token sees only itself and earlier ones of its sequence. paired: blocks go in pairs,
    which have two heads with the same keys and fetch these together.
    """

    def __init__(self, library: CudaLibrary, *, causal: bool, paired: bool) -> None:
        self._library = library
        self._name = "chained" + "_causal" * causal + "_paired" * paired
        self._key_rows = TILE_ROWS // (1 + paired)  # that a block fetches at a time
        late = [clusters(library.driver, 2)] if paired else []
        self._attributes = {False: late, True: [early(library.driver), *late]}

    def launch(
        self, qkv: Sequence[Tensor], out: Tensor, works: ListedWorks, scale: float, stream: int
    ) -> None:
        """Enqueue the attention of a batch on `stream`, early as `launching` says; may be captured.

        qkv, out: as of AttentionBackend.forward, bf16, rows and starts at multiples of 16 bytes. scale: that
        of softmax(q kᵀ · scale) times log2(e).

        Raises:
            CudaError: the driver refused it.
        """
        q, k, _ = qkv
        boxes = (TILE_ROWS, self._key_rows, self._key_rows)
        maps = [self._library.tensor_map(*_heads_view(x, rows)) for x, rows in zip(qkv, boxes, strict=True)]
        numbers = (
            *(number for x in (*qkv, out) for number in _rows(x)),
            ctypes.c_void_p(works.memory.data_ptr()),
            ctypes.c_int(works.capacity),
            ctypes.c_int(q.shape[1] // k.shape[1]),
            ctypes.c_float(scale),
        )
        kernel = f"{self._name}_{q.shape[2]}"
        attributes = self._attributes[current() is not Early.NO]
        config = launch_config(self._library.driver, (works.blocks, 1), _THREADS, attributes, stream)
        self._library.launch(kernel, config, (*maps, *numbers))


def _rows(x: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    """Where x [T, H, D] lies, and how many numbers its rows are apart."""
    return ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.stride(0))


def _heads_view(x: Tensor, rows: int) -> View:
    """x [T, H, D], whose rows may be strided, for the copy engine: boxes of 64 columns and so many rows."""
    num_rows, heads, dim = x.shape
    stride = x.stride(0) * x.element_size()
    return x.data_ptr(), (heads * dim, num_rows), (stride,), (CHUNK, rows)
