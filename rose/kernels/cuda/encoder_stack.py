"""Launches encoder_stack.cu: all layers of a large BERT or XLM-R in one cooperative kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rose.kernels.cuda.cubin import ENCODER_STACK
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.stack import BF16_A_WORD, NARROW, TURNS, StackKernels, head_tile
from rose.kernels.cuda.views import View, plain_view, rows_view

if TYPE_CHECKING:
    from torch import Tensor

# What the kernel is compiled for.
INNER, HEADS, HEAD_DIM = 4096, 16, 64
QKV_WIDTH = 3 * HEADS * HEAD_DIM
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
        """Of all but the products, in the order of `Layer` in encoder_layers.cuh."""
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
    """`Stack` in encoder_layers.cuh."""

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

    source = ENCODER_STACK
    shape = NARROW

    def __init__(
        self, library: CudaLibrary, layers: Sequence[EncoderWeights], *, eps: float, scale: float
    ) -> None:
        self._layers = tuple(layers)  # keeps their memory
        self._numbers = {"num_layers": len(layers), "eps": eps, "scale": scale * math.log2(math.e)}
        self._device = layers[0].qkv.device
        views = (view for layer in layers for view in self.weight_views(layer))
        addresses = [layer.addresses() for layer in layers]
        self.kernels = StackKernels(
            library, self.source.path.stem, views, addresses, self.looked_at(), self._device, self.shape
        )
        self._plain_memory = self.plain_memory()

    def weight_views(self, layer: EncoderWeights) -> list[View]:
        """What the copy engine reads of a layer."""
        weights = layer.qkv, layer.output, layer.wide, layer.narrow
        return [plain_view(weight.data_ptr(), *weight.shape) for weight in weights]

    def looked_at(self) -> dict[str, int]:
        """What the kernel waits for by looking at it, beside partial sums: words of 32 bits by name."""
        return {"qkv": TURNS * QKV_WIDTH * self.shape.max_tokens // BF16_A_WORD}

    def plain_memory(self) -> dict[str, Tensor]:
        """What else launches use, by its name in the kernel's structure; zeros at first."""
        return {}

    def views(self, rows: EncoderRows) -> list[View]:
        """What the copy engine reads of a batch."""
        num_tokens = len(rows.hidden)
        tile = self.shape.tile(num_tokens)
        wide_tile = tile // 2 if tile == _SHARED_TILE else tile
        read = (
            (rows.hidden, head_tile(num_tokens)),
            (rows.hidden, wide_tile),
            (rows.context, tile),
            (rows.wide, tile),
        )
        return [rows_view(x.data_ptr(), x.shape, box) for x, box in read]

    def launch(self, rows: EncoderRows, stream: int) -> None:
        """Enqueue all layers of 1 to `shape.max_tokens` rows on `stream`, torch's current one.

        Raises:
            CudaError: the driver refused it.
        """
        num_tokens = len(rows.hidden)
        structure = EncoderStackArguments(
            num_tokens=num_tokens,
            num_seqs=len(rows.offsets) - 1,
            **{name: getattr(rows, name).data_ptr() for name in EncoderRows.__slots__},
            **self.kernels.addresses(),
            **{name: memory.data_ptr() for name, memory in self._plain_memory.items()},
            **self._numbers,
        )
        self.kernels.enqueue(self.views(rows), structure, num_tokens, stream)
