"""Launches rotary_product.cu: QKV of many rows with its heads normed and rotated, on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rose.aot.products import HEAD_DIM
from rose.kernels.cuda.pingpong import FEATURES, PingpongProduct

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.library import CudaLibrary

# Rows of x in a tile.
TOKENS = 128


# Which rotated pair each of the 64 angles of a token is of, in the order that the kernel reads them: of each
# of a head's 16 pieces of 8 columns a lane has one pair, and reads those of the first 8, then the others.
ANGLE_ORDER = tuple(
    4 * (8 * half + piece) + lane for half in range(2) for lane in range(4) for piece in range(8)
)


class RotaryProduct(PingpongProduct):
    """The kernel of rotary_product.cu. See PingpongProduct."""

    def __init__(self, library: CudaLibrary, processors: int) -> None:
        super().__init__(library, processors, "rotary_128", TOKENS)

    def __call__(
        self, x: Tensor, weight: Tensor, out: Tensor, residual: None, operands: Sequence[Any], *_: object
    ) -> None:
        """`launch` on torch's current stream, with the arguments of rose.kernels.fused.FusedGemm's kernels.

        operands: angles, how many heads are rotated, the norms' weights, what is left alone, scales or None.

        Raises:
            ValueError, CudaError: as `launch`.
        """
        angles, rotated, columns, _, scale = operands[:5]
        stream = torch.cuda.current_stream().cuda_stream
        self.launch((x, weight, columns, scale), (angles, rotated), out, stream)

    def launch(
        self,
        factors: tuple[Tensor, Tensor, Tensor, Tensor | None],
        rotation: tuple[Tensor, int],
        out: Tensor,
        stream: int,
    ) -> None:
        """Enqueue out [M, N] = x weightᵀ, its first heads normed and rotated, on `stream`; may be captured.

        factors: x [M, K], weight [N, K], the norms' weights [N], which the kernel in front must not make, and
        f32[M], factors of rows, or None. rotation: angles f16[M, 128], cosine and sine of each pair, pairs as
        ANGLE_ORDER has them; and how many heads are rotated. Else bf16; all contiguous, at multiples of 16
        bytes.

        Raises:
            ValueError: another width of heads; else as PingpongProduct.enqueue.
            CudaError: the driver refused it.
        """
        (x, weight, columns, scale), (angles, rotated) = factors, rotation
        if angles.shape != (len(x), HEAD_DIM):
            raise ValueError(f"angles {tuple(angles.shape)} of {len(x)} rows; a head has {FEATURES} columns")
        self.enqueue((x, weight), (angles, out), (columns, scale), (rotated,), stream)
