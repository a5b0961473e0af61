"""Attention by torch alone: what serves on a CPU, and on GPUs for which no other backend is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from rose.kernels.rows import copy_real_rows
from rose.runs import equal_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rose.attention.base import AttentionSpec
    from rose.batch import Int32

# Queries that meet their keys at once: with the 2 * 64 keys around them that ModernBERT's see, 256 waste a
# third of the products; fewer cost more calls than they save.
_BAND_ROWS = 256
_WINDOW_SIDES = ("window_size_left", "window_size_right")

if TYPE_CHECKING:
    # Of spec, (q, k, v), cu_seqlens and max_seqlen: [T, heads, D], contiguous; padded rows may hold anything.
    RaggedKernel = Callable[[AttentionSpec, tuple[Tensor, Tensor, Tensor], Tensor, int], Tensor]


class SdpaAttention:
    """Adjacent sequences of one length go through scaled_dot_product_attention in one call, without padding.

    Hand it sequences sorted by length (`rose.layers.length_order`) to make those runs long. With a window,
    blocks of queries meet the keys that any of them sees: work grows with n, not n². On a GPU, 16-bit tensors
    go through torch's own ragged kernel (FlashAttention 2) instead, which has windows and may be captured.
    """

    name = "sdpa"

    def __init__(self, spec: AttentionSpec, kernel: RaggedKernel | None = None) -> None:
        """kernel: for all of a batch at once; None: torch's, for 16-bit tensors on a GPU."""
        self._spec = spec
        self._grouped = spec.num_heads != spec.num_kv_heads
        if kernel is None and spec.device.type == "cuda" and spec.dtype in (torch.float16, torch.bfloat16):
            kernel = flash_attention
        self._kernel = kernel
        self._host_cu_seqlens: list[int] = []

    def __repr__(self) -> str:
        return f"SdpaAttention({self._spec}, kernel={self._kernel})"

    @property
    def capturable(self) -> bool:
        """Only the ragged kernel reads its offsets on the device."""
        return self._kernel is not None

    @property
    def plans(self) -> bool:
        """Where reading the offsets back in the forward would wait for the device."""
        return self._spec.device.type == "cuda" and self._kernel is None

    def plan(self, host_cu_seqlens: Int32) -> None:
        """Keep the offsets for a forward on a GPU."""
        if self.plans:
            self._host_cu_seqlens = host_cu_seqlens.tolist()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> None:
        """See AttentionBackend.forward."""
        if self._kernel is not None:
            copy_real_rows(self._kernel(self._spec, (q, k, v), cu_seqlens, max_seqlen), cu_seqlens, out)
            return
        offsets = self._host_cu_seqlens if cu_seqlens.is_cuda else cu_seqlens.tolist()
        for start, count, length in equal_runs(offsets):
            rows, shape = slice(start, start + count * length), (count, length, -1, q.shape[2])
            queries, keys, values, result = (x[rows].view(shape).transpose(1, 2) for x in (q, k, v, out))
            window = self._spec.window
            if window is None or length <= window + 1:
                result.copy_(self._attend(queries, keys, values, is_causal=self._spec.causal))
            else:
                self._attend_in_bands(queries, keys, values, result, window)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """[N, heads, L, D] of sequences of one length, each within itself."""
        return scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=self._spec.scale, enable_gqa=self._grouped
        )

    def _attend_in_bands(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: int) -> None:
        """The same with a window: q, k, v, out [N, heads, L, D]."""
        length, ahead = q.shape[2], 0 if self._spec.causal else window
        places = torch.arange(length, device=q.device)
        for start in range(0, length, _BAND_ROWS):
            stop = min(start + _BAND_ROWS, length)
            first, last = max(start - window, 0), min(stop + ahead, length)
            distance = places[first:last] - places[start:stop, None]
            seen = (distance >= -window) & (distance <= ahead)
            keys, values = k[:, :, first:last], v[:, :, first:last]
            out[:, :, start:stop] = self._attend(q[:, :, start:stop], keys, values, mask=seen)


def flash_attention(
    spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """[T, heads, D], in which rows past cu_seqlens[-1] hold whatever was in that memory before.

    As torch.nn.attention.varlen, which in torch 2.11 refuses the grouped heads its kernel takes.
    """
    longest = (max_seqlen, max_seqlen)
    sides = (spec.window, 0 if spec.causal else spec.window)
    windows = {} if spec.window is None else dict(zip(_WINDOW_SIDES, sides, strict=True))
    result: Tensor = torch.ops.aten._flash_attention_forward(
        *qkv, cu_seqlens, cu_seqlens, *longest, 0.0, spec.causal, False, scale=spec.scale, **windows
    )[0]
    return result
