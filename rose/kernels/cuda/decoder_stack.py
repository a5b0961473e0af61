"""Launches decoder_stack.cu: all layers of a small Qwen3 in one cooperative kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.kernels.cuda.cubin import DECODER_STACK
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.stack import BF16_A_WORD, NARROW, TURNS, StackKernels, head_tile
from rose.kernels.cuda.views import View, gated_view, half_head_view, plain_view, rows_view

if TYPE_CHECKING:
    from torch import Tensor

# What the kernel is compiled for.
INNER, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 3072, 16, 8, 128
QKV_WIDTH = (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Of a layer, bf16 and contiguous. heads: the norms of queries and keys [2, 128].

    mlp, following: norms of the MLP's input and of the next layer's [1024]; the last layer's is not read.
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    heads: Tensor
    mlp: Tensor
    following: Tensor


@dataclass(frozen=True, slots=True)
class DecoderRows:
    """A batch of T rows on the device, all contiguous.

    residual [T, 1024]: the embeddings; afterwards what the last layer's MLP is to be added to.
    hidden [T, 1024]: these, normed for the first layer; afterwards the last layer's MLP.
    context [T, 2048], narrow [T, 3072]: overwritten. positions: i32[T]. offsets: i32[S+1].
    """

    residual: Tensor
    hidden: Tensor
    context: Tensor
    narrow: Tensor
    positions: Tensor
    offsets: Tensor


class DecoderStackArguments(ctypes.Structure):
    """`Stack` in decoder_layers.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "layers")),
        *((name, ctypes.c_void_p) for name in ("hidden", "residual", "context", "narrow", "qkv", "partials")),
        *((name, ctypes.c_void_p) for name in ("squares", "angles", "positions", "offsets", "counters")),
        *((name, ctypes.c_int) for name in ("num_layers", "num_tokens", "num_seqs", "causal")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class DecoderKernels:
    """All layers of one model. angles: f32[P, 128], cosines and sines. scale: on q·k. eps: of all norms.

    A launch uses this object's memory: launches follow one another.
    """

    source = DECODER_STACK
    shape = NARROW

    def __init__(
        self,
        library: CudaLibrary,
        layers: Sequence[DecoderWeights],
        angles: Tensor,
        *,
        eps: float,
        scale: float,
        causal: bool,
    ) -> None:
        self._layers = tuple(layers)  # keeps their memory
        self._angles = angles
        self._numbers = {
            "num_layers": len(layers),
            "causal": int(causal),
            "eps": eps,
            "scale": scale * math.log2(math.e),
        }
        views = (
            view(weight.data_ptr(), *weight.shape)
            for layer in layers
            for view, weight in (
                (half_head_view, layer.qkv),
                (plain_view, layer.output),
                (gated_view, layer.gate_up),
                (plain_view, layer.down),
            )
        )
        norms = [[one.heads.data_ptr(), one.mlp.data_ptr(), one.following.data_ptr()] for one in layers]
        self.kernels = StackKernels(
            library, self.source.path.stem, views, norms, self.looked_at(), angles.device, self.shape
        )
        self._plain_memory = self.plain_memory()

    def looked_at(self) -> dict[str, int]:
        """What the kernel waits for by looking at it, beside partial sums: words of 32 bits by name."""
        heads, tokens = QUERY_HEADS + KEY_HEADS, self.shape.max_tokens
        return {
            "qkv": TURNS * QKV_WIDTH * tokens // BF16_A_WORD,
            "squares": TURNS * heads * tokens * 2,  # of both halves of a head
        }

    def plain_memory(self) -> dict[str, Tensor]:
        """What else launches use, by its name in the kernel's structure; zeros at first."""
        return {}

    def views(self, rows: DecoderRows) -> list[View]:
        """What the copy engine reads of a batch."""
        num_tokens = len(rows.hidden)
        tile = self.shape.tile(num_tokens)
        read = (
            (rows.hidden, tile),
            (rows.hidden, head_tile(num_tokens)),
            (rows.context, tile),
            (rows.narrow, tile),
        )
        return [rows_view(x.data_ptr(), x.shape, box) for x, box in read]

    def launch(self, rows: DecoderRows, stream: int) -> None:
        """Enqueue all layers of 1 to `shape.max_tokens` rows on `stream`, torch's current one.

        Raises:
            CudaError: the driver refused it.
        """
        num_tokens = len(rows.hidden)
        structure = DecoderStackArguments(
            angles=self._angles.data_ptr(),
            num_tokens=num_tokens,
            num_seqs=len(rows.offsets) - 1,
            **{name: getattr(rows, name).data_ptr() for name in DecoderRows.__slots__},
            **self.kernels.addresses(),
            **{name: memory.data_ptr() for name, memory in self._plain_memory.items()},
            **self._numbers,
        )
        self.kernels.enqueue(self.views(rows), structure, num_tokens, stream)
