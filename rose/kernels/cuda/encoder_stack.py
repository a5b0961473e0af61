"""Launches encoder_stack.cu: all layers of a large BERT or XLM-R in one cooperative kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.stack import BF16_A_WORD, NARROW, TURNS, StackKernels, head_tile
from rose.kernels.cuda.views import plain_view, rows_view

if TYPE_CHECKING:
    from torch import Tensor

# What the kernel is compiled for.
INNER, HEADS, HEAD_DIM = 4096, 16, 64
# Of a batch from this one on two blocks share 64 columns of the widening, each with half of the rows.
_SHARED_TILE = 128


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Of a layer, bf16 and contiguous: four products and their biases, and two LayerNorms after the sums."""

    qkv: Tensor
    output: Tensor
    wide: Tensor
    narrow: Tensor
    qkv_bias: Tensor
    wide_bias: Tensor
    output_bias: Tensor
    attended_norm: Tensor
    attended_shift: Tensor
    narrow_bias: Tensor
    hidden_norm: Tensor
    hidden_shift: Tensor

    def addresses(self) -> list[int]:
        """Of all but the products, in the order of `Layer` in encoder_stack.cu."""
        return [getattr(self, field.name).data_ptr() for field in fields(self)[4:]]


@dataclass(frozen=True, slots=True)
class EncoderRows:
    """A batch of T rows on the device, all contiguous.

    hidden [T, 1024]: the embeddings; afterwards the last layer's. context [T, 1024], wide [T, 4096]:
    overwritten. offsets: i32[S+1].
    """

    hidden: Tensor
    context: Tensor
    wide: Tensor
    offsets: Tensor


class EncoderStackArguments(ctypes.Structure):
    """`Stack` in encoder_stack.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "layers")),
        *((name, ctypes.c_void_p) for name in ("hidden", "context", "wide", "qkv", "partials")),
        *((name, ctypes.c_void_p) for name in ("offsets", "counters")),
        *((name, ctypes.c_int) for name in ("num_layers", "num_tokens", "num_seqs")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class EncoderKernels:
    """All layers of one model. scale: on q·k. eps: of all norms.

    A launch uses this object's memory: launches follow one another.
    """

    def __init__(
        self, library: CudaLibrary, layers: Sequence[EncoderWeights], *, eps: float, scale: float
    ) -> None:
        self._layers = tuple(layers)  # keeps their memory
        self._numbers = {"num_layers": len(layers), "eps": eps, "scale": scale * math.log2(math.e)}
        views = (
            plain_view(weight.data_ptr(), *weight.shape)
            for layer in layers
            for weight in (layer.qkv, layer.output, layer.wide, layer.narrow)
        )
        looked_at = {"qkv": TURNS * 3 * HEADS * HEAD_DIM * NARROW.max_tokens // BF16_A_WORD}
        addresses = [layer.addresses() for layer in layers]
        device = layers[0].qkv.device
        self.kernels = StackKernels(library, "encoder_stack", views, addresses, looked_at, device)

    def launch(self, rows: EncoderRows, stream: int) -> None:
        """Enqueue all layers of 1 to 128 rows on `stream`, torch's current one.

        Raises:
            CudaError: the driver refused it.
        """
        num_tokens = len(rows.hidden)
        tile = NARROW.tile(num_tokens)
        wide_tile = tile // 2 if tile == _SHARED_TILE else tile
        read = (
            (rows.hidden, head_tile(num_tokens)),
            (rows.hidden, wide_tile),
            (rows.context, tile),
            (rows.wide, tile),
        )
        structure = EncoderStackArguments(
            num_tokens=num_tokens,
            num_seqs=len(rows.offsets) - 1,
            **{name: getattr(rows, name).data_ptr() for name in EncoderRows.__slots__},
            **self.kernels.addresses(),
            **self._numbers,
        )
        views = [rows_view(x.data_ptr(), x.shape, box) for x, box in read]
        self.kernels.enqueue(views, structure, num_tokens, stream)
