"""What a forward pass reads and writes, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rose.attention.base import AttentionBackend
    from rose.batch import Int32, TokenOutput


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A ragged batch on the device, padded to T tokens and S sequences (on the CPU: no empty sequences).

    input_ids: i32[T]; rows past cu_seqlens[-1] hold id 0 and are inert.
    cu_seqlens: i32[S+1]; sequences past the real ones are empty, their offsets repeat the last.
    token_type_ids: i32[T] or None (all zero).
    host_cu_seqlens: the same offsets on the host, for backends that plan there; while a graph is captured and
        replayed that is not enough: kernels must never depend on it.
    max_seqlen: upper bound of any sequence's length; on a GPU the shape's, eagerly and captured alike.
    attention: the backend chosen for this shape; its `plan` has been called for this batch.
    spans: i32[2, R] or None: the starts of the tokens that rows of the output are means of, over their ends.
    """

    input_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    token_type_ids: torch.Tensor | None
    host_cu_seqlens: Int32
    max_seqlen: int
    attention: AttentionBackend
    spans: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """S, empty sequences included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def bounds(self) -> torch.Tensor:
        """What `rose.kernels.pooling.mean_pool` pools: spans i32[2, R], or sequences i32[S+1]."""
        return self.cu_seqlens if self.spans is None else self.spans


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a forward writes: vectors f32[S, D]; int8 i8[S, D] or None. A row a span, if the batch has spans.

    Rows of empty sequences are zero or stale.
    tokens: f32[T, W] of each kind of token output that is wanted; rows of padding hold anything.
    """

    vectors: torch.Tensor
    int8: torch.Tensor | None = None
    tokens: Mapping[TokenOutput, torch.Tensor] = field(default_factory=dict)
