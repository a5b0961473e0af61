"""Which kernels are worth building, and what their files are called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rose.aot.products import DEFAULT_PRODUCTS

HOPPER = "sm_90a"
GEMM, FLASH = "gemm", "fa4"
KERNELS = (FLASH, "flashinfer-fa3", "flashinfer-fa3-fp8", "flashinfer-fa2", GEMM)


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """A way to build FlashAttention-4: "fa4", or with a tile and "-early", such as "fa4-64x128-early".

    tile: rows of q and of k; None: the package's choice for the heads. early: brought up while the kernel
    before it still runs.
    """

    tile: tuple[int, int] | None = None
    early: bool = False

    @classmethod
    def parse(cls, kernel: str) -> FlashKernel:
        """From a variant's kernel.

        Raises:
            ValueError: it is not such a name.
        """
        match = re.fullmatch(FLASH + r"(?:-(\d+)x(\d+))?(-early)?", kernel)
        if match is None:
            raise ValueError(f"{kernel!r} names no build of FlashAttention-4")
        return cls((int(match[1]), int(match[2])) if match[1] else None, match[3] is not None)


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One shared object. group and causal are None where one object serves all of them.

    A product with a fused epilogue is named as in rose.aot.products and has no head_dim.
    """

    kernel: str
    head_dim: int | None = None
    group: int | None = None
    causal: bool | None = None
    arch: str = HOPPER

    @property
    def family(self) -> str:
        """One of KERNELS."""
        return next((name for name in (GEMM, FLASH) if self.kernel.startswith(f"{name}-")), self.kernel)

    @property
    def file(self) -> str:
        """Name of the shared object, such as "fa4-hd128-g2-full-bf16-sm_90a.so"."""
        parts = [self.kernel]
        if self.head_dim is not None:
            parts.append(f"hd{self.head_dim}")
        if self.group is not None:
            parts.append(f"g{self.group}")
        if self.causal is not None:
            parts.append("causal" if self.causal else "full")
        return "-".join([*parts, "bf16", self.arch]) + ".so"


# 128/g2: pplx-embed and Qwen3 0.6B (16 query, 8 key/value heads); g4: the 4B (32, 8).
# 64: BGE-M3 and BERT; 32: MiniLM and bge-small (FlashInfer has no kernel for 32).
DEFAULT_VARIANTS = (
    KernelVariant("fa4", 128, 2, False),
    KernelVariant("fa4", 128, 2, True),
    KernelVariant("fa4", 128, 4, False),
    KernelVariant("fa4", 128, 4, True),
    KernelVariant("fa4", 64, 1, False),
    KernelVariant("fa4", 32, 1, False),
    KernelVariant("fa4-64x128-early", 128, 2, False),
    KernelVariant("fa4-64x128-early", 64, 1, False),
    KernelVariant("flashinfer-fa3", 128),
    KernelVariant("flashinfer-fa3", 64),
    KernelVariant("flashinfer-fa3-fp8", 128),
    KernelVariant("flashinfer-fa2", 64),
    KernelVariant("flashinfer-fa2", 128),
    *(KernelVariant(product.name) for product in DEFAULT_PRODUCTS),
)


def select(kernels: list[str], head_dims: list[int], arch: str) -> list[KernelVariant]:
    """Variants of the named kernels and head dimensions (empty: all) that can be built for `arch`.

    All but flashinfer-fa2, which compiles for any arch, are Hopper code.
    """
    chosen = []
    for variant in DEFAULT_VARIANTS:
        if kernels and variant.family not in kernels:
            continue
        if head_dims and variant.head_dim not in head_dims:
            continue
        if arch != HOPPER and variant.kernel != "flashinfer-fa2":
            continue
        chosen.append(KernelVariant(variant.kernel, variant.head_dim, variant.group, variant.causal, arch))
    return chosen
