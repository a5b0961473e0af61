"""Launches decoder_stack.cu: all layers of a small Qwen3 in one cooperative kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.stack import BF16_A_WORD, MAX_TOKENS, TURNS, StackKernels
from rose.kernels.cuda.views import gated_view, half_head_view, plain_view

if TYPE_CHECKING:
    from torch import Tensor

# What the kernel is compiled for.
INNER, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 3072, 16, 8, 128


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
    """`Stack` in decoder_fetch.cuh."""

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
        heads = QUERY_HEADS + KEY_HEADS
        looked_at = {
            "qkv": TURNS * (heads + KEY_HEADS) * HEAD_DIM * MAX_TOKENS // BF16_A_WORD,
            "squares": TURNS * heads * MAX_TOKENS * 2,  # of both halves of a head
        }
        self.kernels = StackKernels(library, "decoder_stack", views, norms, looked_at, angles.device)

    def launch(self, rows: DecoderRows, stream: int) -> None:
        """Enqueue all layers of 1 to 128 rows on `stream`, torch's current one.

        Raises:
            CudaError: the driver refused it.
        """
        num_tokens = len(rows.hidden)
        tile, head_tile = self.kernels.tile(num_tokens), self.kernels.head_tile(num_tokens)
        read = ((rows.hidden, tile), (rows.hidden, head_tile), (rows.context, tile), (rows.narrow, tile))
        structure = DecoderStackArguments(
            angles=self._angles.data_ptr(),
            num_tokens=num_tokens,
            num_seqs=len(rows.offsets) - 1,
            **{name: getattr(rows, name).data_ptr() for name in DecoderRows.__slots__},
            **self.kernels.addresses(),
            **self._numbers,
        )
        self.kernels.enqueue(read, structure, num_tokens, stream)
