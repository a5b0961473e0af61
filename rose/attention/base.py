"""The one Protocol behind which every attention kernel sits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rose.batch import Int32
    from rose.kernels.rope import QkRope


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a backend is built for: one per model.

    num_heads, num_kv_heads: query and key/value heads (grouped-query when they differ).
    head_dim: elements a head. scale: factor on q·k, usually head_dim ** -0.5.
    causal: whether a token sees only itself and earlier ones of its sequence.
    dtype: of q, k, v and out. device: where they are.
    window: how many places away the farthest token is that one sees, before it and, unless causal, after it;
        None: any number.
    fp8: whether the layers can also make q, k and v in e4m3 (see Fp8Attention).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    fp8: bool = False


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the choice of a backend may depend on: tokens and sequences (buckets), the longest sequence."""

    num_tokens: int
    num_seqs: int
    max_seqlen: int


class AttentionBackend(Protocol):
    """Ragged self-attention: every sequence attends within itself."""

    @property
    def name(self) -> str:
        """As in the policy table and at /info.

        "fa4", "fa4-64x128-early", "flashinfer-fa3", "flashinfer-fa3-fp8", "flashinfer-fa2", "chained",
        "flat", "flat-product", "sdpa".
        """
        ...

    @property
    def capturable(self) -> bool:
        """Whether `forward` may be captured in a CUDA graph and replayed with other offsets."""
        ...

    @property
    def plans(self) -> bool:
        """Whether `plan` does anything; if not, it need not be called."""
        ...

    def plan(self, host_cu_seqlens: Int32) -> None:
        """Do the host's part for a batch, before it runs eagerly, is captured or is replayed.

        host_cu_seqlens: i32[S+1] as in DeviceBatch. Kernels that read the offsets on the device need nothing.
        """
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> None:
        """Write softmax(q kᵀ · scale) v into `out`; rows past cu_seqlens[-1] may stay as they were.

        q, out: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]; last dimension contiguous,
        rows may be strided (views of one packed qkv). cu_seqlens: i32[S+1] on the device.
        """
        ...


@runtime_checkable
class ProductAttention(AttentionBackend, Protocol):
    """A backend that can also start from a decoder's QKV product, before norm and rotation."""

    def forward_product(
        self, product: torch.Tensor, rope: QkRope, out: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> None:
        """`forward` of what `rose.kernels.rope.qk_norm_rope` makes of `product`, which stays as it is.

        product: [T, (Hq + 2 Hk) D], or split-K partial sums [K, T, (Hq + 2 Hk) D] of it; contiguous.
        """
        ...


@runtime_checkable
class Fp8Attention(AttentionBackend, Protocol):
    """A backend whose q, k and v are e4m3. `forward` takes them for the numbers that they are."""

    def forward_fp8(
        self, heads: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> None:
        """`forward` of numbers that stand for themselves times the scale of their head.

        heads: e4m3[T, Hq + 2 Hk, D], queries, keys and values. scales: f32[Hq + 2 Hk]. out: of spec.dtype.
        """
        ...


@runtime_checkable
class ListedAttention(AttentionBackend, Protocol):
    """A backend whose layers share a list of work, which the device makes of a batch's offsets."""

    def write_list(self, cu_seqlens: torch.Tensor, num_tokens: int) -> None:
        """Enqueue making the list, ahead of the first `forward` of a batch, in its graph if it has one.

        cu_seqlens: i32[S+1] on the device, as of `forward`. num_tokens: T, padding included.
        """
        ...


def input_dtype(backend: AttentionBackend, spec: AttentionSpec) -> torch.dtype:
    """Of the q, k and v that `backend.forward` takes."""
    import torch

    return torch.float8_e4m3fn if isinstance(backend, Fp8Attention) else spec.dtype


def begin(backend: AttentionBackend, cu_seqlens: torch.Tensor, num_tokens: int) -> None:
    """Enqueue what comes once a batch, before the first layer's attention."""
    if isinstance(backend, ListedAttention):
        backend.write_list(cu_seqlens, num_tokens)
