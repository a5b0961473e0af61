"""Launches residual_product.cu: products that end in the residual stream, on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rose.kernels.cuda.pingpong import PingpongProduct

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.library import CudaLibrary

# Rows of x in a tile.
TOKENS = 160


class ResidualProduct(PingpongProduct):
    """The kernel of residual_product.cu. See PingpongProduct."""

    def __init__(self, library: CudaLibrary, processors: int) -> None:
        super().__init__(library, processors, "residual_160", TOKENS)

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

        factors: x [M, K], weight [N, K], columns [N], which the kernel in front must not make. results:
        residual [M, N], hidden [M, N] = residual * columns, and f32[M, N / 128], sums of the unrounded
        residual's squares. Else bf16; all contiguous, at multiples of 16 bytes.

        Raises:
            ValueError, CudaError: as PingpongProduct.enqueue.
        """
        (x, weight, columns), (residual, hidden, partial) = factors, results
        self.enqueue((x, weight), (residual, hidden), (columns, partial), (), stream)
