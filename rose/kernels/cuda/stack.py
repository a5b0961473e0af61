"""What kernels that go through all layers of a model in one cooperative launch have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rose.kernels.cuda.cubin import CudaSource
from rose.kernels.cuda.library import CudaLibrary, cuda_library
from rose.kernels.cuda.plan import CHUNK, SHARED_BYTES, token_tile

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.views import View

MAX_TOKENS = 128
# What the kernels are compiled for.
HIDDEN = 1024
BLOCKS = 128  # one a multiprocessor, all at once
TURNS = 2  # layers whose heads lie side by side
SPLITS = 8
BF16_A_WORD = 2
_THREADS = 320
_MIN_TILE = 32
_PARTS, _GROUPS, _COUNTER_WORDS = 4, 8, 8
_MAP_BYTES = 128
_ALIGNMENT = 8  # of biases and norms, read four numbers at a time
# Tensor maps in device memory, 14 KB a model, for as long as the process lives: the copy engine may remember
# one by its address, and must not meet another one there.
_MAPS: list[Tensor] = []


class StackKernels:
    """The kernels `name`_32, _64 and _128 of `library`, for the layers of one model.

    memory: of these launches, by its name in the kernel's structure. weights: tensor maps, layer by layer, of
    `views`. layers: `addresses` of all else that a layer reads. partials, and what `looked_at` names (in
    words of 32 bits): the kernel waits for them by looking at them: all ones before a launch and after it.

    A launch uses this object's memory: launches follow one another.

    Raises:
        ValueError: an address is no multiple of 8 bytes.
    """

    def __init__(
        self,
        library: CudaLibrary,
        name: str,
        views: Iterable[View],
        addresses: Sequence[Sequence[int]],
        looked_at: Mapping[str, int],
        device: torch.device,
    ) -> None:
        if any(address % _ALIGNMENT for one in addresses for address in one):
            raise ValueError(f"what a layer reads must lie at multiples of {_ALIGNMENT} bytes")
        self.library = library
        self._name = name
        maps = [library.tensor_map(*view) for view in views]
        encoded = b"".join(ctypes.string_at(int(one.getPtr()), _MAP_BYTES) for one in maps)
        _MAPS.append(torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device))
        counters = len(addresses) * _PARTS * _GROUPS * _COUNTER_WORDS
        words = {**looked_at, "partials": SPLITS * MAX_TOKENS * HIDDEN // BF16_A_WORD}
        self.memory: dict[str, Tensor] = {
            "weights": _MAPS[-1],
            "layers": torch.tensor(addresses, dtype=torch.int64, device=device),
            "counters": torch.zeros(counters, dtype=torch.int32, device=device),
            **{
                name: torch.full((size,), -1, dtype=torch.int32, device=device)
                for name, size in words.items()
            },
        }
        together = library.driver.CUlaunchAttribute()
        together.id = library.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        together.value.cooperative = 1
        self._attributes = [together]

    @staticmethod
    def tile(num_tokens: int) -> int:
        """Rows that the kernel for a batch of 1 to 128 is compiled for: 32, 64 or 128."""
        return max(token_tile(num_tokens), _MIN_TILE)

    @staticmethod
    def head_tile(num_tokens: int) -> int:
        """Rows of them for which one block makes heads."""
        tile = StackKernels.tile(num_tokens)
        return tile // 2 if tile > _MIN_TILE else tile

    def addresses(self) -> dict[str, int]:
        """Of this object's memory."""
        return {name: memory.data_ptr() for name, memory in self.memory.items()}

    def enqueue(
        self, rows: Sequence[tuple[Tensor, int]], structure: ctypes.Structure, num_tokens: int, stream: int
    ) -> None:
        """Enqueue all layers of a batch on `stream`, torch's current one.

        rows: what the copy engine reads, [num_tokens, width] each, with how many of them at a time.

        Raises:
            CudaError: the driver refused it.
        """
        maps = [
            self.library.tensor_map(x.data_ptr(), (x.shape[1], num_tokens), (x.shape[1] * 2,), (CHUNK, box))
            for x, box in rows
        ]
        self.memory["counters"].zero_()
        kernel = f"{self._name}_{self.tile(num_tokens)}"
        self.library.launch(kernel, self._config(stream), (*maps, structure))

    def _config(self, stream: int) -> Any:
        driver = self.library.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.blockDimX = BLOCKS, _THREADS
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = SHARED_BYTES
        config.attrs, config.numAttrs = self._attributes, len(self._attributes)
        config.hStream = driver.CUstream(stream)
        return config


def stack_library(source: CudaSource) -> CudaLibrary | None:
    """The compiled kernels for torch's current device; None as of `cuda_library`, or if it has no room."""
    library = cuda_library(source)
    if library is None or torch.cuda.get_device_properties().multi_processor_count < BLOCKS:
        return None
    return library
