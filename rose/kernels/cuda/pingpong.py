"""What launches of Hopper's products of many rows have in common: see pingpong.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rose.kernels.cuda.launch_config import clusters, early, launch_config
from rose.kernels.cuda.plan import CHUNK
from rose.kernels.cuda.views import plain_view, rows_view
from rose.kernels.early import Early, current

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.library import CudaLibrary

# Rows of the weight in a tile; blocks that share rows of x; threads of a block.
FEATURES, BLOCKS, THREADS = 128, 2, 384


class PingpongProduct:
    """A kernel of tiles of `tokens` rows of x, compiled into `library`.

    processors: of the GPU, on each of which a block runs.
    """

    def __init__(self, library: CudaLibrary, processors: int, kernel: str, tokens: int) -> None:
        self._library = library
        self._processors = processors // BLOCKS * BLOCKS
        self._kernel, self._tokens = kernel, tokens
        late = [clusters(library.driver, BLOCKS)]
        self._attributes = {False: late, True: [early(library.driver), *late]}

    def enqueue(
        self,
        factors: tuple[Tensor, Tensor],
        tiles: Sequence[Tensor],
        others: Sequence[Tensor | None],
        numbers: Sequence[int],
        stream: int,
    ) -> None:
        """Enqueue the kernel on `stream`; may be captured.

        Launched early as `launching` says; the weight must not be what the kernel in front makes.
        factors: x [M, K] and weight [N, K], bf16. tiles: what else is read or written by tiles of rows,
        [M, a multiple of 64] of 2 bytes each. others: what is found by its address alone. numbers: the
        kernel's arguments behind M and the tiles of N and K. All contiguous, at multiples of 16 bytes.

        Raises:
            ValueError: there are no rows, K is no multiple of 64, or N none of 256.
            CudaError: the driver refused it.
        """
        x, weight = factors
        (m, k), n = x.shape, len(weight)
        if m == 0 or k == 0 or k % CHUNK or n % (BLOCKS * FEATURES):
            raise ValueError(f"{self._kernel} of {m} rows and a weight [{n}, {k}]")
        tensor_map, tokens = self._library.tensor_map, self._tokens
        maps = (
            tensor_map(*plain_view(weight.data_ptr(), n, k, rows=FEATURES)),
            tensor_map(*rows_view(x.data_ptr(), (m, k), tokens // BLOCKS)),
            *(tensor_map(*rows_view(tile.data_ptr(), tile.shape, tokens)) for tile in tiles),
        )
        addresses = (ctypes.c_void_p(None if one is None else one.data_ptr()) for one in others)
        sizes = (ctypes.c_int(value) for value in (m, n // FEATURES, k // CHUNK, *numbers))
        blocks = min(-(-m // tokens) * (n // FEATURES), self._processors)
        attributes = self._attributes[current() is not Early.NO]
        config = launch_config(self._library.driver, (blocks, 1), THREADS, attributes, stream)
        self._library.launch(self._kernel, config, (*maps, *addresses, *sizes))
