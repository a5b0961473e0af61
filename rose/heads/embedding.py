"""The embedding head: a pooled vector a sequence, its int8 if there is a quantiser, and what tokens give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.heads.tokens import TokenHeads
from rose.kernels.pooling import gather_rows, mean_pool, pool_scratch
from rose.kernels.segments import max_pool, weighted_mean_pool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import Outputs
    from rose.kernels.pooling import Which


class EmbeddingHead:
    """Of each sequence's hidden states the first, the last, the mean or the maximum, as the config says.

    Vectors are left as they are: cutting and normalising happen for each request, not for each batch.
    which: the row that the model takes of each sequence, or None if it takes all.
    """

    def __init__(self, config: ModelConfig, device: torch.device, tokens: TokenHeads | None = None) -> None:
        named: dict[str, Which] = {"cls": "first", "last": "last"}
        self.which = named.get(config.pooling)
        self._pooling = config.pooling
        self._scratch = pool_scratch(config.hidden_size, device)
        self._tokens = tokens or TokenHeads()

    def __call__(self, hidden: Tensor, bounds: Tensor, which: Which | None, outputs: Outputs) -> None:
        """Write outputs.vectors f32[S, H], and outputs.int8 and outputs.tokens if they are there.

        hidden: [T, H]; or [S, H] if which is "only", when tokens give nothing. bounds: offsets of sequences,
        i32[S+1], or of means also i32[2, S]; see `mean_pool`. which: the row to take, None for all.
        """
        if which is not None:
            gather_rows(hidden, bounds, which, outputs)
        elif self._pooling == "max":
            max_pool(hidden, bounds, outputs)
        elif self._pooling == "weightedmean":
            weighted_mean_pool(hidden, bounds, outputs)
        else:
            mean_pool(hidden, bounds, outputs, self._scratch)
        if outputs.tokens:
            self._tokens(hidden, outputs.tokens)
