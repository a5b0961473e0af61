"""Which class builds which architecture, and what every model has in common."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol

from rose.heads.dense import dense_stages
from rose.heads.score import score_stages
from rose.models.staged import StagedModel

if TYPE_CHECKING:
    import torch

    from rose.attention.base import AttentionSpec
    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.weights import WeightSource

# By ModelConfig.architecture. Only the model that is built is imported.
_MODELS = {
    "bert": ("rose.models.bert", "BertModel"),
    "nomic_bert": ("rose.models.nomic_bert", "NomicBertModel"),
    "modernbert": ("rose.models.modernbert", "ModernBertModel"),
    "gemma3": ("rose.models.gemma3", "Gemma3Model"),
    "qwen3": ("rose.models.qwen3", "Qwen3Model"),
    "qwen2": ("rose.models.qwen3", "Qwen3Model"),
    "llama": ("rose.models.qwen3", "Qwen3Model"),
}


class Model(Protocol):
    """A whole model, from token ids to pooled vectors or scores."""

    @property
    def config(self) -> ModelConfig:
        """Shapes and outputs."""
        ...

    @property
    def attention_spec(self) -> AttentionSpec:
        """What the attention backends in DeviceBatch must be built for."""
        ...

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Enqueue the forward of `batch` and write `outputs`; on a GPU without allocating or waiting."""
        ...


def build_model(
    config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device, max_tokens: int
) -> Model:
    """Read the weights onto `device`. max_tokens: the most tokens of one batch, padding included.

    Raises:
        ModelLoadError: a tensor is missing or has a wrong shape.
    """
    module, name = _MODELS[config.architecture]
    built: Model = getattr(importlib.import_module(module), name)(config, weights, dtype, device, max_tokens)
    if config.scorer is not None:
        return StagedModel(built, score_stages(config, weights, device))
    if config.dense:
        return StagedModel(built, dense_stages(config, weights, device))
    return built
