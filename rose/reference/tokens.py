"""BGE-M3's heads over tokens, spelled out. Source: Chen et al., BGE M3-Embedding, arXiv 2402.03216."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rose.weights import WeightSource


def lexical_weights(hidden: Tensor, weights: WeightSource) -> Tensor:
    """f32[n, 1] of hidden f32[n, H]: what each token weighs, none below 0."""
    return _linear(hidden, weights, "sparse_linear.pt", 1).clamp(min=0.0)


def multi_vectors(hidden: Tensor, weights: WeightSource) -> Tensor:
    """f32[n, H] of hidden f32[n, H]: each token's vector, of length 1."""
    vectors = _linear(hidden, weights, "colbert_linear.pt", hidden.shape[1])
    return vectors / torch.sqrt(vectors.square().sum(-1, keepdim=True))


def _linear(hidden: Tensor, weights: WeightSource, file: str, width: int) -> Tensor:
    weight = weights.tensor(f"{file}/weight", (width, hidden.shape[1])).to(hidden.device, torch.float32)
    return hidden @ weight.T + weights.tensor(f"{file}/bias", (width,)).to(hidden.device, torch.float32)
