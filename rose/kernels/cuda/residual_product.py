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

# Rows of the weight and of x in a tile; blocks that share these; threads of a block.
FEATURES, TOKENS, _BLOCKS, _THREADS = 128, 160, 2, 384


class ResidualProduct:
    """The kernel of residual_product.cu, compiled into `library`.

    processors: of the GPU, on each of which a block runs.
    """

    def __init__(self, library: CudaLibrary, processors: int) -> None:
        self._library = library
        self._processors = processors // _BLOCKS * _BLOCKS
        late = [clusters(library.driver, _BLOCKS)]
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
            ValueError: there are no rows, K is no multiple of 64, or N none of 256.
            CudaError: the driver refused it.
        """
        (x, weight, columns), (residual, hidden, partial) = factors, results
        (m, k), n = x.shape, len(weight)
        if m == 0 or k == 0 or k % CHUNK or n % (_BLOCKS * FEATURES):
            raise ValueError(f"a residual product of {m} rows and a weight [{n}, {k}]")
        tensor_map = self._library.tensor_map
        maps = (
            tensor_map(*plain_view(weight.data_ptr(), n, k, rows=FEATURES)),
            tensor_map(*rows_view(x.data_ptr(), (m, k), TOKENS // _BLOCKS)),
            tensor_map(*rows_view(residual.data_ptr(), (m, n), TOKENS)),
            tensor_map(*rows_view(hidden.data_ptr(), (m, n), TOKENS)),
        )
        addresses = (ctypes.c_void_p(columns.data_ptr()), ctypes.c_void_p(partial.data_ptr()))
        numbers = (ctypes.c_int(value) for value in (m, n // FEATURES, k // CHUNK))
        blocks = min(-(-m // TOKENS) * (n // FEATURES), self._processors)
        attributes = self._attributes[current() is not Early.NO]
        config = launch_config(self._library.driver, (blocks, 1), _THREADS, attributes, stream)
        self._library.launch("residual_160", config, (*maps, *addresses, *numbers))
