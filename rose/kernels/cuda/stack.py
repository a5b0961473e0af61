"""Launches decoder_stack.cu: all layers of a small Qwen3 in one cooperative kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rose.kernels.cuda.cubin import DECODER_STACK
from rose.kernels.cuda.library import CudaLibrary, cuda_library
from rose.kernels.cuda.plan import CHUNK, SHARED_BYTES, token_tile
from rose.kernels.cuda.views import gated_view, half_head_view, plain_view

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 128
# What the kernel is compiled for.
HIDDEN, INNER, QUERY_HEADS, KEY_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128
BLOCKS = 128  # one a multiprocessor, all at once
_THREADS = 320
_MIN_TILE = 32
_SPLITS, _PARTS, _GROUPS, _COUNTER_WORDS = 8, 4, 8, 8
_TURNS = 2  # layers whose heads lie side by side
_MAP_BYTES = 128
# Tensor maps in device memory, 14 KB a model, for as long as the process lives: the copy engine may remember
# one by its address, and must not meet another one there.
_MAPS: list[Tensor] = []


@dataclass(frozen=True, slots=True)
class StackLayer:
    """A layer's weights, bf16 and contiguous. heads: the norms of queries and keys [2, 128].

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
class StackRows:
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


class Stack(ctypes.Structure):
    """`Stack` in decoder_fetch.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "layers")),
        *((name, ctypes.c_void_p) for name in ("hidden", "residual", "context", "narrow", "qkv", "partials")),
        *((name, ctypes.c_void_p) for name in ("squares", "angles", "positions", "offsets", "counters")),
        *((name, ctypes.c_int) for name in ("num_layers", "num_tokens", "num_seqs", "causal")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class StackKernels:
    """All layers of one model. angles: f32[P, 128], cosines and sines. scale: on q·k. eps: of all norms.

    A launch uses this object's memory: launches follow one another.
    """

    def __init__(
        self,
        library: CudaLibrary,
        layers: Sequence[StackLayer],
        angles: Tensor,
        *,
        eps: float,
        scale: float,
        causal: bool,
    ) -> None:
        self._library = library
        self._layers = tuple(layers)  # keeps their memory
        self._angles = angles
        self._memory = self._allocate(angles.device)
        self._numbers = {
            "num_layers": len(layers),
            "causal": int(causal),
            "eps": eps,
            "scale": scale * math.log2(math.e),
        }
        together = library.driver.CUlaunchAttribute()
        together.id = library.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = 1
        self._attributes = [together]

    def launch(self, rows: StackRows, stream: int) -> None:
        """Enqueue all layers of 1 to 128 rows on `stream`, torch's current one.

        Raises:
            CudaError: the driver refused it.
        """
        num_tokens = len(rows.hidden)
        tile = max(token_tile(num_tokens), _MIN_TILE)
        heads_tile = tile // 2 if tile > _MIN_TILE else tile  # of a block of heads
        maps = [
            self._library.tensor_map(x.data_ptr(), (x.shape[1], num_tokens), (x.shape[1] * 2,), (CHUNK, box))
            for x, box in (
                (rows.hidden, tile),
                (rows.hidden, heads_tile),
                (rows.context, tile),
                (rows.narrow, tile),
            )
        ]
        given = {name: getattr(rows, name).data_ptr() for name in StackRows.__slots__}
        own = {name: memory.data_ptr() for name, memory in self._memory.items()}
        stack = Stack(
            angles=self._angles.data_ptr(),
            num_tokens=num_tokens,
            num_seqs=len(rows.offsets) - 1,
            **given,
            **own,
            **self._numbers,
        )
        self._memory["counters"].zero_()
        self._library.launch(f"decoder_stack_{tile}", self._config(stream), (*maps, stack))

    def _allocate(self, device: torch.device) -> dict[str, Tensor]:
        norms = [[one.heads.data_ptr(), one.mlp.data_ptr(), one.following.data_ptr()] for one in self._layers]
        heads, bf16_a_word = QUERY_HEADS + KEY_HEADS, 2
        # Words that the kernel waits for by looking at them: all ones before a launch, and again after it.
        looked_at = {
            "qkv": _TURNS * (heads + KEY_HEADS) * HEAD_DIM * MAX_TOKENS // bf16_a_word,
            "partials": _SPLITS * MAX_TOKENS * HIDDEN // bf16_a_word,
            "squares": _TURNS * heads * MAX_TOKENS * 2,  # of both halves of a head
        }
        counters = len(norms) * _PARTS * _GROUPS * _COUNTER_WORDS
        _MAPS.append(torch.frombuffer(bytearray(self._maps()), dtype=torch.uint8).to(device))
        return {
            "weights": _MAPS[-1],
            "layers": torch.tensor(norms, dtype=torch.int64, device=device),
            "counters": torch.zeros(counters, dtype=torch.int32, device=device),
            **{
                name: torch.full((size,), -1, dtype=torch.int32, device=device)
                for name, size in looked_at.items()
            },
        }

    def _config(self, stream: int) -> Any:
        driver = self._library.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.blockDimX = BLOCKS, _THREADS
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = SHARED_BYTES
        config.attrs, config.numAttrs = self._attributes, len(self._attributes)
        config.hStream = driver.CUstream(stream)
        return config

    def _maps(self) -> bytes:
        """The weights' tensor maps, in the order that the kernel counts them in."""
        views = (
            view(weight.data_ptr(), *weight.shape)
            for layer in self._layers
            for view, weight in (
                (half_head_view, layer.qkv),
                (plain_view, layer.output),
                (gated_view, layer.gate_up),
                (plain_view, layer.down),
            )
        )
        maps = [self._library.tensor_map(*view) for view in views]
        return b"".join(ctypes.string_at(int(one.getPtr()), _MAP_BYTES) for one in maps)


def stack_library() -> CudaLibrary | None:
    """The compiled kernel for torch's current device; None as of `cuda_library`, or if it has no room."""
    library = cuda_library(DECODER_STACK)
    if library is None or torch.cuda.get_device_properties().multi_processor_count < BLOCKS:
        return None
    return library
