"""Attention by torch alone: what serves on a CPU, and on GPUs for which no other backend is there."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from rose.attention.base import AttentionSpec
    from rose.batch import Int32


class SdpaAttention:
    """Adjacent sequences of one length go through scaled_dot_product_attention in one call, without padding.

    Hand it sequences sorted by length (`rose.layers.length_order`) to make those runs long. On a GPU, 16-bit
    tensors go through torch's own ragged kernel (FlashAttention 2) instead, which may be captured.
    """

    name = "sdpa"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._grouped = spec.num_heads != spec.num_kv_heads
        self._varlen = spec.device.type == "cuda" and spec.dtype in (torch.float16, torch.bfloat16)
        self._host_cu_seqlens: list[int] = []

    def __repr__(self) -> str:
        return f"SdpaAttention({self._spec}, varlen={self._varlen})"

    @property
    def capturable(self) -> bool:
        """Only the ragged kernel reads its offsets on the device."""
        return self._varlen

    def plan(self, host_cu_seqlens: Int32, num_tokens: int, slot: int) -> None:
        """Keep the offsets for a forward on a GPU, where reading them back would wait for the device."""
        if self._spec.device.type == "cuda":
            self._host_cu_seqlens = host_cu_seqlens.tolist()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> None:
        """See AttentionBackend.forward."""
        if self._varlen:
            out.copy_(self._ragged(q, k, v, cu_seqlens, max_seqlen))
            return
        offsets = self._host_cu_seqlens if cu_seqlens.is_cuda else cu_seqlens.tolist()
        for start, count, length in _runs(offsets):
            rows, shape = slice(start, start + count * length), (count, length, -1, q.shape[2])
            result = scaled_dot_product_attention(
                q[rows].view(shape).transpose(1, 2),
                k[rows].view(shape).transpose(1, 2),
                v[rows].view(shape).transpose(1, 2),
                is_causal=self._spec.causal,
                scale=self._spec.scale,
                enable_gqa=self._grouped,
            )
            out[rows].view(shape).copy_(result.transpose(1, 2))

    def _ragged(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """As torch.nn.attention.varlen, which in torch 2.11 refuses the grouped heads its kernel takes."""
        causal, scale = self._spec.causal, self._spec.scale
        result: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, causal, False, scale=scale
        )[0]
        return result


def _runs(offsets: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, sequences, tokens each) of every run of adjacent equally long sequences, none empty."""
    start, count, length = 0, 0, 0
    for begin, end in pairwise(offsets):
        if end - begin == length:
            count += 1
            continue
        if count and length:
            yield start, count, length
        start, count, length = begin, 1, end - begin
    if count and length:
        yield start, count, length
