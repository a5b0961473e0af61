"""The models in plain PyTorch, fp32, one sequence at a time: the specification that tests compare against.

Shares no code with the fast path: no layers, kernels, attention backends or heads of this project. Slow by
design. Every formula is spelled out; heads are looped so that 32 768 tokens need one [n, n] score matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose.reference.bert import bert
from rose.reference.decoder import decoder
from rose.reference.formulas import Reader
from rose.reference.rotary import gemma3, modernbert, nomic_bert

if TYPE_CHECKING:
    from rose.batch import Int32
    from rose.config import ModelConfig
    from rose.configs.model import Architecture
    from rose.weights import WeightSource

_FORWARDS: Mapping[Architecture, Callable[[ModelConfig, Reader, Tensor, Tensor], Tensor]] = {
    "bert": bert,
    "nomic_bert": nomic_bert,
    "modernbert": modernbert,
    "gemma3": gemma3,
    "qwen3": decoder,
    "qwen2": decoder,
    "llama": decoder,
}


def reference_vectors(
    config: ModelConfig,
    weights: WeightSource,
    sequences: Sequence[Int32],
    token_type_ids: Sequence[Int32] | None = None,
    device: str = "cpu",
) -> Tensor:
    """Pooled vectors f32[B, H] of `sequences` (each i32[n]), before any Dense or Normalize module.

    Zeros for an empty sequence.
    """
    vectors = torch.zeros(len(sequences), config.hidden_size)
    for row, hidden in enumerate(reference_hidden(config, weights, sequences, token_type_ids, device)):
        if len(hidden):
            vectors[row] = _pool(hidden, config.pooling).cpu()
    return vectors


def reference_hidden(
    config: ModelConfig,
    weights: WeightSource,
    sequences: Sequence[Int32],
    token_type_ids: Sequence[Int32] | None = None,
    device: str = "cpu",
) -> Iterator[Tensor]:
    """Last hidden states f32[n, H] of each of `sequences` (each i32[n]), on `device`."""
    read = Reader(weights, torch.device(device))
    forward = _FORWARDS[config.architecture]
    for row, sequence in enumerate(sequences):
        ids = torch.as_tensor(sequence, dtype=torch.long, device=read.device)
        types = torch.zeros_like(ids)
        if token_type_ids is not None:
            types = torch.as_tensor(token_type_ids[row], dtype=torch.long, device=read.device)
        hidden = torch.zeros(0, config.hidden_size)
        if len(ids):
            with torch.inference_mode():
                hidden = forward(config, read, ids, types)
        yield hidden


def _pool(hidden: Tensor, pooling: str) -> Tensor:
    """f32[n, H] -> f32[H]."""
    if pooling == "mean":
        return hidden.double().mean(0).float()
    if pooling == "max":
        return hidden.max(0).values
    if pooling == "weightedmean":
        weights = torch.arange(1, len(hidden) + 1, dtype=torch.float64, device=hidden.device)
        return (weights @ hidden.double() / weights.sum()).float()
    return hidden[0 if pooling == "cls" else -1]
