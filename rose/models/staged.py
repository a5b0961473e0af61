"""Any model with linear layers behind its pooling: scorers, and encoders with Dense modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.models.one_launch import in_one_launch

if TYPE_CHECKING:
    from rose.attention.base import AttentionSpec
    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.heads.stages import Stages
    from rose.models.registry import Model


class StagedModel:
    """Pools as `model` does, then goes through `stages`. Allocates and waits as little as `model` does."""

    def __init__(self, model: Model, stages: Stages) -> None:
        self.config: ModelConfig = model.config
        self.attention_spec: AttentionSpec = model.attention_spec
        self._model = model
        self._stages = stages

    def in_one_launch(self, num_tokens: int) -> bool:
        """See OneLaunch: as `model`."""
        return in_one_launch(self._model, num_tokens)

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Write outputs.vectors f32[S, D], D being what the last stage gives."""
        pooled = self._stages.pooled(outputs)
        self._model.forward(batch, pooled)
        self._stages(pooled, outputs)
