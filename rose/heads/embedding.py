"""The embedding head: one pooled vector a sequence, and its int8 where the model has a quantiser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.kernels.pooling import gather_rows, mean_pool, pool_scratch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import Outputs
    from rose.kernels.pooling import Which


class EmbeddingHead:
    """Mean, first or last token of each sequence's hidden states, as the model's config says.

    Vectors are left as they are: cutting and normalising happen for each request, not for each batch.
    which: the row that the model takes of each sequence, or None for the mean of all.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        named: dict[str, Which] = {"cls": "first", "last": "last"}
        self.which = named.get(config.pooling)
        self._scratch = pool_scratch(config.hidden_size, device)

    def __call__(self, hidden: Tensor, cu_seqlens: Tensor, which: Which | None, outputs: Outputs) -> None:
        """Write outputs.vectors f32[S, H], and outputs.int8 if it is there.

        hidden: [T, H]; or [S, H] if which is "only". which: the row to take, None for the mean.
        """
        if which is None:
            mean_pool(hidden, cu_seqlens, outputs, self._scratch)
        else:
            gather_rows(hidden, cu_seqlens, which, outputs)
