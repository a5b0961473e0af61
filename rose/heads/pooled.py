"""Pooling of whole hidden states, in every way that sentence-transformers' Pooling module is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.kernels.pooling import gather_rows, mean_pool, pool_scratch
from rose.kernels.segments import max_pool, weighted_mean_pool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import Outputs


class PooledHead:
    """One vector a sequence from all its rows, as the model's config says. Neither cuts nor normalises."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._pooling = config.pooling
        self._scratch = pool_scratch(config.hidden_size, device)

    def __call__(self, hidden: Tensor, cu_seqlens: Tensor, outputs: Outputs) -> None:
        """Write outputs.vectors f32[S, H], and outputs.int8 if it is there, from hidden [T, H]."""
        if self._pooling == "mean":
            mean_pool(hidden, cu_seqlens, outputs, self._scratch)
        elif self._pooling == "max":
            max_pool(hidden, cu_seqlens, outputs)
        elif self._pooling == "weightedmean":
            weighted_mean_pool(hidden, cu_seqlens, outputs)
        else:
            gather_rows(hidden, cu_seqlens, "first" if self._pooling == "cls" else "last", outputs)
