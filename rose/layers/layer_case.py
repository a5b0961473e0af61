"""What tune_layers knows of a model: ways to run its layers, and how far each is from fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rose.aot.folders import default_folders
from rose.aot.library import KernelLibrary, KernelQuery, load_module
from rose.aot.products import OWN_PRODUCTS, Epilogue, ProductKernel
from rose.aot.variants import FLASH, GEMM
from rose.attention.backends import load_backends
from rose.attention.base import AttentionBackend, AttentionSpec, begin
from rose.attention.fa4 import Fa4Attention
from rose.device_batch import DeviceBatch
from rose.kernels.early import Early
from rose.kernels.fused import FusedGemm, FusedKey, FusedLookup, load

# Layers that are compared with fp32.
CHECKED = 3
EARLY = tuple(early.name for early in Early)

# Which kernel, backend or mode stands at which place; None: cuBLAS and what follows it.
Way = Mapping[str, str | None]
# What may stand at each place.
Places = Mapping[str, Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class Sequences:
    """A batch of `count` sequences of `length` tokens each."""

    count: int
    length: int

    def __str__(self) -> str:
        return f"{self.count}x{self.length}"

    @property
    def rows(self) -> int:
        """Tokens of all of them."""
        return self.count * self.length

    @classmethod
    def parse(cls, text: str) -> Sequences:
        """From such as "5x512".

        Raises:
            ValueError: it is not two positive numbers.
        """
        count, length = map(int, text.split("x"))
        if min(count, length) < 1:
            raise ValueError(f"{text!r} is no batch of sequences")
        return cls(count, length)


class Case(Protocol):
    """One model's layers for one batch.

    m: rows. base: cuBLAS and kernels between, but for SwiGLU or GELU as the table has it. modes: places of
    each way to put a layer together, by its name. epilogues: of the product at each place, by mode.
    shapes: of its weight, [n, k].
    """

    m: int
    num_layers: int
    epilogues: Mapping[str, Mapping[str, Epilogue]]
    shapes: Mapping[str, tuple[int, int]]
    base: Way
    modes: Mapping[str, Places]

    def enqueue(self, way: Way, num_layers: int) -> Callable[[], object]:
        """What runs so many layers that way."""

    def error(self, way: Way) -> float:
        """Relative error of the first CHECKED layers."""


def built(epilogue: Epilogue, most: int = 256 * 256) -> list[str | None]:
    """Names of the products with that epilogue that load; most: elements of a tile."""
    library = KernelLibrary(default_folders(), torch.cuda.get_device_capability())
    # What an older version built may have names that this one does not know.
    prefix = f"{GEMM}-{epilogue}-"
    names = sorted({record.kernel for record in library.records if record.kernel.startswith(prefix)})
    kernels = [*map(ProductKernel.parse, names), *OWN_PRODUCTS]
    return [
        kernel.name
        for kernel in kernels
        if kernel.epilogue == epilogue and kernel.tile_m * kernel.tile_n <= most and load(kernel) is not None
    ]


def backends_of(spec: AttentionSpec, names: Collection[str]) -> dict[str, AttentionBackend]:
    """Those of a server that are named, and every build of FlashAttention-4."""
    found = {name: backend for name, backend in load_backends(spec).items() if name in names}
    library = KernelLibrary(default_folders(), torch.cuda.get_device_capability())
    group = spec.num_heads // spec.num_kv_heads
    for name in sorted(
        {record.kernel for record in library.records if record.kernel.startswith(f"{FLASH}-")}
    ):
        path = library.find(KernelQuery(name, spec.head_dim, group, spec.causal))
        if path is not None:
            found[name] = Fa4Attention(spec, load_module(path).func)
    return found


def products_of(case: Case, way: Way) -> dict[FusedKey, str | None]:
    """The way's kernels by what they compute."""
    epilogues = case.epilogues[way["mode"] or ""]
    return {(epilogue, *case.shapes[place]): way[place] for place, epilogue in epilogues.items()}


def lookup_of(choices: Mapping[FusedKey, str | None]) -> FusedLookup:
    """These kernels by (epilogue, n, k), and no others."""

    def lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
        name = choices.get((epilogue, n, k))
        return None if name is None else load(ProductKernel.parse(name))

    return lookup


def device_batch(sequences: Sequences, attention: AttentionBackend, device: torch.device) -> DeviceBatch:
    """The batch as a model is given it."""
    offsets, m = np.arange(sequences.count + 1, dtype=np.int32) * sequences.length, sequences.rows
    attention.plan(offsets)
    ids, cu_seqlens = torch.zeros(m, dtype=torch.int32, device=device), torch.from_numpy(offsets).to(device)
    begin(attention, cu_seqlens, m)
    return DeviceBatch(ids, cu_seqlens, None, offsets, sequences.length, attention)


def normal(device: torch.device, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
    """bf16."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(mean, std)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Error of `actual` by the norm of what it should be; infinite where it is NaN."""
    error = float((actual.float() - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error
