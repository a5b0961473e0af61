"""Which kernels are worth building, and what their files are called."""

from __future__ import annotations

from dataclasses import dataclass

HOPPER = "sm_90a"
KERNELS = ("fa4", "flashinfer-fa3", "flashinfer-fa2")


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One shared object. group and causal are None where one object serves all of them."""

    kernel: str
    head_dim: int
    group: int | None = None
    causal: bool | None = None
    arch: str = HOPPER

    @property
    def file(self) -> str:
        """Name of the shared object, such as "fa4-hd128-g2-full-bf16-sm_90a.so"."""
        parts = [self.kernel, f"hd{self.head_dim}"]
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
    KernelVariant("flashinfer-fa3", 128),
    KernelVariant("flashinfer-fa3", 64),
    KernelVariant("flashinfer-fa2", 64),
    KernelVariant("flashinfer-fa2", 128),
)


def select(kernels: list[str], head_dims: list[int], arch: str) -> list[KernelVariant]:
    """Variants of the named kernels and head dimensions (empty: all) that can be built for `arch`.

    fa4 and flashinfer-fa3 are Hopper code; flashinfer-fa2 compiles for any arch.
    """
    chosen = []
    for variant in DEFAULT_VARIANTS:
        if kernels and variant.kernel not in kernels:
            continue
        if head_dims and variant.head_dim not in head_dims:
            continue
        if arch != HOPPER and variant.kernel != "flashinfer-fa2":
            continue
        chosen.append(KernelVariant(variant.kernel, variant.head_dim, variant.group, variant.causal, arch))
    return chosen
