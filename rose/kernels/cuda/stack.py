"""What kernels that go through all layers of a model in one cooperative launch have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels.cuda.cubin import CudaSource
from rose.kernels.cuda.launch_config import cooperative, launch_config
from rose.kernels.cuda.library import CudaLibrary, cuda_library

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.views import View

# What the kernels are compiled for.
HIDDEN = 1024
BLOCKS = 128  # one a multiprocessor, all at once
TURNS = 2  # layers whose heads lie side by side
BF16_A_WORD = 2
_COUNTER_WORDS = 8
_MAP_BYTES = 128
_ALIGNMENT = 16  # of biases and norms, read eight numbers at a time
# Tensor maps in device memory, 14 KB a model and source, for as long as the process lives: the copy engine
# may remember one by its address, and must not meet another one there.
_MAPS: list[Tensor] = []


@dataclass(frozen=True, slots=True)
class StackShape:
    """What a source's kernels are compiled for.

    tiles: the most rows that each takes, rising. sums: partial sums that a token has at a time, of what
    leaves a layer's halves. parts, groups: counters of a layer. threads: of a block.
    """

    tiles: tuple[int, ...]
    sums: int
    parts: int
    groups: int
    threads: int

    @property
    def max_tokens(self) -> int:
        """The most rows."""
        return self.tiles[-1]

    def tile(self, num_tokens: int) -> int:
        """Rows that the kernel for a batch of 1 to `max_tokens` is compiled for."""
        return next(tile for tile in self.tiles if num_tokens <= tile)


# One block has columns of all tokens, or of half of them.
NARROW = StackShape(tiles=(32, 64, 128), sums=8, parts=4, groups=8, threads=320)


class StackKernels:
    """The kernels `name`_32 and so on of `library`, one a tile of `shape`, for the layers of one model.

    memory: of these launches, by its name in the kernel's structure. weights: tensor maps, layer by layer, of
    `views`. layers: `addresses` of all else that a layer reads. partials, and what `looked_at` names (in
    words of 32 bits): the kernel waits for them by looking at them: all ones before a launch and after it.

    A launch uses this object's memory: launches follow one another.

    Raises:
        ValueError: an address is no multiple of 16 bytes.
    """

    def __init__(
        self,
        library: CudaLibrary,
        name: str,
        views: Iterable[View],
        addresses: Sequence[Sequence[int]],
        looked_at: Mapping[str, int],
        device: torch.device,
        shape: StackShape = NARROW,
    ) -> None:
        if any(address % _ALIGNMENT for one in addresses for address in one):
            raise ValueError(f"what a layer reads must lie at multiples of {_ALIGNMENT} bytes")
        self.library = library
        self.shape = shape
        self._name = name
        maps = [library.tensor_map(*view) for view in views]
        encoded = b"".join(ctypes.string_at(int(one.getPtr()), _MAP_BYTES) for one in maps)
        _MAPS.append(torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device))
        counters = len(addresses) * shape.parts * shape.groups * _COUNTER_WORDS
        words = {**looked_at, "partials": shape.sums * shape.max_tokens * HIDDEN // BF16_A_WORD}
        self.memory: dict[str, Tensor] = {
            "weights": _MAPS[-1],
            "layers": torch.tensor(addresses, dtype=torch.int64, device=device),
            "counters": torch.zeros(counters, dtype=torch.int32, device=device),
            **{
                name: torch.full((size,), -1, dtype=torch.int32, device=device)
                for name, size in words.items()
            },
        }
        self._attributes = [cooperative(library.driver)]

    def addresses(self) -> dict[str, int]:
        """Of this object's memory."""
        return {name: memory.data_ptr() for name, memory in self.memory.items()}

    def enqueue(
        self, views: Iterable[View], structure: ctypes.Structure, num_tokens: int, stream: int
    ) -> None:
        """Enqueue all layers of a batch on `stream`, torch's current one.

        views: what the copy engine reads.

        Raises:
            CudaError: the driver refused it.
        """
        maps = [self.library.tensor_map(*view) for view in views]
        self.memory["counters"].zero_()
        kernel = f"{self._name}_{self.shape.tile(num_tokens)}"
        config = launch_config(self.library.driver, (BLOCKS, 1), self.shape.threads, self._attributes, stream)
        self.library.launch(kernel, config, (*maps, structure))


def head_tile(num_tokens: int) -> int:
    """Rows of a batch of 1 to 128 for which one block makes heads."""
    tile = NARROW.tile(num_tokens)
    return tile // 2 if tile > NARROW.tiles[0] else tile


def stack_library(source: CudaSource) -> CudaLibrary | None:
    """The compiled kernels for torch's current device; None as of `cuda_library`, or if it has no room."""
    library = cuda_library(source)
    if library is None or torch.cuda.get_device_properties().multi_processor_count < BLOCKS:
        return None
    return library
