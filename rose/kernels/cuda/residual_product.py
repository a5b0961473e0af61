"""Launches residual_product.cu: products that end in the residual stream, on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rose.kernels.cuda.launch_config import clusters, early, launch_config
from rose.kernels.cuda.plan import CHUNK
from rose.kernels.cuda.views import plain_view, rows_view
from rose.kernels.early import Early, current

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.library import CudaLibrary

# Rows of the weight in a tile; threads of a block.
FEATURES, _THREADS = 128, 384


class ResidualProduct:
    """A kernel of residual_product.cu, compiled into `library`.

    tokens: rows of x in a tile, as in rose.aot.products.OWN_PRODUCTS. paired: blocks go in pairs, whose tiles
    have the same rows of x and fetch these together. processors: of the GPU, on each of which a block runs.
    """

    def __init__(self, library: CudaLibrary, tokens: int, *, paired: bool, processors: int) -> None:
        self._library = library
        self._tokens, self._blocks = tokens, 1 + paired
        self._processors = processors // self._blocks * self._blocks
        self._kernel = f"residual{'_paired' * paired}_{tokens}"
        late = [clusters(library.driver, 2)] if paired else []
        self._attributes = {False: late, True: [early(library.driver), *late]}

    def __call__(
        self, x: Tensor, weight: Tensor, hidden: Tensor, residual: Tensor, operands: Sequence[Any], *_: object
    ) -> None:
        """`launch` on torch's current stream, with the arguments of rose.kernels.fused.FusedGemm's kernels.

        operands: columns, the residual once more, partial sums.

        Raises:
            ValueError, CudaError: as `launch`.
        """
        columns, _, partial = operands[:3]
        stream = torch.cuda.current_stream().cuda_stream
        self.launch((x, weight, columns), (residual, hidden, partial), stream)

    def launch(
        self, factors: tuple[Tensor, Tensor, Tensor], results: tuple[Tensor, Tensor, Tensor], stream: int
    ) -> None:
        """Enqueue residual [M, N] += x weightᵀ and what is made of it on `stream`; may be captured.

        Launched early as `launching` says; the weight and columns must not be what the kernel in front makes.
        factors: x [M, K], weight [N, K], columns [N]. results: residual [M, N], hidden [M, N] = residual *
        columns, and f32[M, N / 128], sums of the unrounded residual's squares. Else bf16; all contiguous, at
        multiples of 16 bytes.

        Raises:
            ValueError: there are no rows, K is no multiple of 64, or N none of 128, or of 256 for pairs.
            CudaError: the driver refused it.
        """
        (x, weight, columns), (residual, hidden, partial) = factors, results
        (m, k), n = x.shape, len(weight)
        if m == 0 or k == 0 or k % CHUNK or n % (self._blocks * FEATURES):
            raise ValueError(f"{self._kernel} of {m} rows and a weight [{n}, {k}]")
        tensor_map, tokens = self._library.tensor_map, self._tokens
        maps = (
            tensor_map(*plain_view(weight.data_ptr(), n, k, rows=FEATURES)),
            tensor_map(*rows_view(x.data_ptr(), (m, k), tokens // self._blocks)),
            tensor_map(*rows_view(residual.data_ptr(), (m, n), tokens)),
            tensor_map(*rows_view(hidden.data_ptr(), (m, n), tokens)),
        )
        addresses = (ctypes.c_void_p(columns.data_ptr()), ctypes.c_void_p(partial.data_ptr()))
        numbers = (ctypes.c_int(value) for value in (m, n // FEATURES, k // CHUNK))
        blocks = min(-(-m // tokens) * (n // FEATURES), self._processors)
        attributes = self._attributes[current() is not Early.NO]
        config = launch_config(self._library.driver, (blocks, 1), _THREADS, attributes, stream)
        self._library.launch(self._kernel, config, (*maps, *addresses, *numbers))
