"""Attention of heads in FP8 that runs anywhere."""

from __future__ import annotations

import torch

from rose.attention.base import AttentionSpec
from rose.attention.sdpa import SdpaAttention


class Fp8Sdpa(SdpaAttention):
    """torch's own attention of what the numbers stand for. calls: how often it was asked for that."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._parts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.calls = 0

    def forward_fp8(
        self, heads: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> None:
        """See Fp8Attention.forward_fp8."""
        self.calls += 1
        exact = (heads.float() * scales[:, None]).to(out.dtype)
        self.forward(*torch.split(exact, self._parts, dim=1), out, cu_seqlens, len(out))
