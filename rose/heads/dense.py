"""sentence-transformers' Dense modules: linear layers over pooled vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.heads.stages import Stage, Stages

if TYPE_CHECKING:
    from rose.config import Dense, ModelConfig
    from rose.weights import WeightSource


def dense_stages(config: ModelConfig, weights: WeightSource, device: torch.device) -> Stages:
    """What follows the pooling of a model with Dense modules, on `device`; each has a folder of its own.

    Raises:
        ModelLoadError: a tensor is missing or has a wrong shape.
    """

    def stage(dense: Dense) -> Stage:
        shape = (dense.out_features, dense.in_features)
        weight = weights.tensor(f"{dense.folder}/linear.weight", shape).to(device, torch.float32)
        bias = None
        if dense.bias:
            named = weights.tensor(f"{dense.folder}/linear.bias", shape[:1])
            bias = named.to(device, torch.float32)
        return Stage(weight, bias, dense.activation)

    return Stages([stage(dense) for dense in config.dense])
