"""The scoring head: one raw logit a label for each sequence. Sigmoid and softmax are left to who asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.errors import ModelLoadError
from rose.heads.stages import Stage, Stages
from rose.kernels.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.configs.model import Activation, Scorer
    from rose.weights import WeightSource


def score_stages(config: ModelConfig, weights: WeightSource, device: torch.device) -> Stages:
    """What follows the pooled token of a scoring model, on `device`; see `rose.configs.model.Scorer`.

    Raises:
        ModelLoadError: the config names no scorer, or a tensor is missing or has a wrong shape.
    """
    if config.scorer is None:
        raise ModelLoadError(f"this {config.architecture} model has no head that scores")
    return Stages(_Reader(config, weights, device).stages(config.scorer))


class _Reader:
    """Reads a head's tensors by Hugging Face's names, as fp32."""

    def __init__(self, config: ModelConfig, weights: WeightSource, device: torch.device) -> None:
        self._config = config
        self._weights = weights
        self._device = device

    def stages(self, scorer: Scorer) -> list[Stage]:
        size, labels = self._config.hidden_size, len(scorer.labels)
        if scorer.kind == "pooler":
            return [self._dense("pooler.dense", size, "tanh"), self._dense("classifier", labels)]
        if scorer.kind == "roberta":
            return [self._dense("classifier.dense", size, "tanh"), self._dense("classifier.out_proj", labels)]
        if scorer.kind == "modernbert":
            bias = self._tensor("head.dense.bias", size) if scorer.bias else None
            dense = Stage(
                self._tensor("head.dense.weight", size, size), bias, "gelu", self._norm("head.norm")
            )
            return [dense, self._dense("classifier", labels)]
        if scorer.kind == "linear":
            return [Stage(self._tensor("score.weight", labels, size))]
        return [Stage(self._token_row(scorer))]

    def _dense(self, name: str, height: int, activation: Activation = "identity") -> Stage:
        weight = self._tensor(f"{name}.weight", height, self._config.hidden_size)
        return Stage(weight, self._tensor(f"{name}.bias", height), activation)

    def _norm(self, name: str) -> LayerNorm:
        config = self._config
        weight = self._tensor(f"{name}.weight", config.hidden_size)
        has_bias = config.norm_bias
        bias = self._tensor(f"{name}.bias", config.hidden_size) if has_bias else torch.zeros_like(weight)
        return LayerNorm(weight, bias, config.norm_eps)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.tensor(name, shape).to(self._device, torch.float32)

    def _token_row(self, scorer: Scorer) -> Tensor:
        """f32[1, H]: the true token's row of the output embedding, less the false one's.

        One product instead of two, and the difference is taken before anything is rounded.
        """
        config = self._config
        name = "embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        table = self._weights.tensor(name, (config.vocab_size, config.hidden_size))
        row = table[scorer.true_id].to(self._device, torch.float32)
        if scorer.false_id is not None:
            row = row - table[scorer.false_id].to(self._device, torch.float32)
        return row.unsqueeze(0)
