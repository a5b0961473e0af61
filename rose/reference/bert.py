"""BERT, RoBERTa and XLM-R."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose.reference.formulas import Mask, Reader, attend, gelu, layer_norm

if TYPE_CHECKING:
    from rose.config import ModelConfig


def bert(config: ModelConfig, read: Reader, ids: Tensor, types: Tensor) -> Tensor:
    """Hidden states f32[n, H] of BERT: post-norm layers. Source: Devlin et al., arXiv 1810.04805."""
    hidden_size, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def dense(x: Tensor, name: str, width: int, height: int) -> Tensor:
        return x @ read(f"{name}.weight", height, width).T + read(f"{name}.bias", height)

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, read(f"{name}.weight", hidden_size), read(f"{name}.bias", hidden_size), eps)

    def table(name: str, rows: int) -> Tensor:
        return read(f"embeddings.{name}_embeddings.weight", rows, hidden_size)

    positions = torch.arange(len(ids), device=ids.device) + config.position_offset
    hidden = table("word", config.vocab_size)[ids] + table("position", config.max_positions)[positions]
    hidden = norm(hidden + table("token_type", config.type_vocab_size)[types], "embeddings.LayerNorm")
    for index in range(config.num_layers):
        layer = f"encoder.layer.{index}"
        q, k, v = (
            dense(hidden, f"{layer}.attention.self.{part}", hidden_size, hidden_size).view(
                len(ids), config.num_heads, config.head_dim
            )
            for part in ("query", "key", "value")
        )
        mixed = dense(attend(q, k, v, Mask()), f"{layer}.attention.output.dense", hidden_size, hidden_size)
        hidden = norm(hidden + mixed, f"{layer}.attention.output.LayerNorm")
        widened = gelu(dense(hidden, f"{layer}.intermediate.dense", hidden_size, inner))
        hidden = norm(
            hidden + dense(widened, f"{layer}.output.dense", inner, hidden_size), f"{layer}.output.LayerNorm"
        )
    return hidden
