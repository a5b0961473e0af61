"""Attention by Triton kernels of our own, for few tokens and for short sequences.

Offsets are read on the device, so there is no host plan, and one graph serves any lengths. Neither padded
rows nor keys of other sequences are ever read with a weight: what they hold does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.attention.flat_plan import flat_plan

if TYPE_CHECKING:
    import torch

    from rose.attention.base import AttentionSpec
    from rose.attention.flat_plan import FlatPlan
    from rose.batch import Int32
    from rose.kernels.rope import QkRope

_HEAD_DIMS = (64, 128)
_DTYPES = ("torch.bfloat16", "torch.float16")


def takes(spec: AttentionSpec) -> bool:
    """Whether the kernels are for such heads: of 64 or 128 elements of 16 bits, seeing the whole sequence."""
    return spec.head_dim in _HEAD_DIMS and str(spec.dtype) in _DTYPES and spec.window is None


class FlatAttention:
    """From q, k and v, as any backend."""

    name = "flat"
    capturable = True
    plans = False
    from_product = False

    def __init__(self, spec: AttentionSpec) -> None:
        """Needs Triton.

        Raises:
            ImportError: it is not installed.
        """
        from rose.kernels.jit import flat_attention

        self._spec = spec
        self._kernels = flat_attention

    def plan(self, host_cu_seqlens: Int32) -> None:
        """Nothing: the kernel reads the offsets on the device."""

    def plan_of(self, num_tokens: int, num_seqs: int) -> FlatPlan:
        """How a batch of such a size is divided."""
        return flat_plan(self._spec, num_tokens, num_seqs, self.from_product)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> None:
        """See AttentionBackend.forward; max_seqlen is not needed."""
        plan = flat_plan(self._spec, len(q), len(cu_seqlens) - 1, from_product=False)
        self._kernels.flat_attention((q, k, v), cu_seqlens, self._spec, plan, out)


class FlatProductAttention(FlatAttention):
    """Also straight from the QKV product, which spares the kernel that norms and rotates q and k."""

    name = "flat-product"
    from_product = True

    def forward_product(
        self, product: torch.Tensor, rope: QkRope, out: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> None:
        """See ProductAttention.forward_product."""
        plan = self.plan_of(len(out), len(cu_seqlens) - 1)
        self._kernels.flat_attention_of_product(product, rope, cu_seqlens, self._spec, plan, out)


BACKENDS: tuple[type[FlatAttention], ...] = (FlatAttention, FlatProductAttention)
