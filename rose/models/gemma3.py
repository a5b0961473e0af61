"""Gemma 3's text model as EmbeddingGemma uses it: bidirectional, most layers with a window. Wiring only.

Source: Gemma 3 technical report, arXiv 2503.19786; transformers' modeling_gemma3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rose.heads.embedding import EmbeddingHead
from rose.kernels.embedding import EmbeddedTokens, embed_tokens
from rose.kernels.norm import RmsNorm, add_rms_norm, rms_norm
from rose.layers.activations import ActivationMemory
from rose.layers.compile_ahead import compile_ahead, row_counts
from rose.layers.linear import Linear
from rose.layers.rotary import (
    GatedUnit,
    RotaryAttention,
    attention_spec,
    layer_ropes,
    run_encoder,
    window_attention,
)
from rose.layers.tensors import TensorReader

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.kernels.rope import QkRope
    from rose.weights import WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    """Each part is normed on its way in and on its way out. next_norm: of what follows the layer."""

    attention: RotaryAttention
    attended_norm: RmsNorm
    mlp_norm: RmsNorm
    mlp: GatedUnit
    widened_norm: RmsNorm
    next_norm: RmsNorm


class Gemma3Model:
    """Token ids to pooled vectors. On a GPU a forward neither allocates nor waits, so it may be captured."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        self.config = config
        self.attention_spec = attention_spec(config, dtype, device)
        self._read = TensorReader(weights, dtype, device)
        self._exact = TensorReader(weights, torch.float32, device)
        table = weights.tensor("embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._table = (table.to(device).float() * config.hidden_size**0.5).to(dtype)
        self._first_norm = self._norm("layers.0.input_layernorm")
        self._layers = [self._layer(index, rope) for index, rope in enumerate(layer_ropes(config, device))]
        self._head = EmbeddingHead(config, device)
        self._memory = ActivationMemory(config, max_tokens, dtype, device)
        if device.type == "cuda":
            compile_ahead(self, row_counts((), max_tokens))

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Write the pooled vectors of `batch`, a row a sequence, to `outputs`."""
        run_encoder(self._run, batch, outputs, self.attention_spec.device)

    def _run(self, batch: DeviceBatch, outputs: Outputs) -> None:
        rows = self._memory.rows(batch.num_tokens)
        residual, hidden = rows.residual, rows.hidden
        embedded = EmbeddedTokens(residual, hidden, rows.positions)
        embed_tokens(batch.input_ids, batch.cu_seqlens, self._table, self._first_norm, embedded)
        for layer in self._layers:
            attended = layer.attention(hidden, batch, rows)
            rms_norm(attended, layer.attended_norm, attended)
            add_rms_norm(attended, residual, layer.mlp_norm, hidden)
            widened = layer.mlp(hidden, rows)
            rms_norm(widened, layer.widened_norm, widened)
            add_rms_norm(widened, residual, layer.next_norm, hidden)
        self._head(hidden, batch.bounds, self._head.which, outputs)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._factor(name, self.config.hidden_size), self.config.norm_eps)

    def _factor(self, name: str, size: int) -> Tensor:
        """f32[size] of the norm `name`: bf16 has nothing between 1 and 1.0078."""
        return self._exact(f"{name}.weight", size) + self.config.norm_offset

    def _layer(self, index: int, rope: QkRope) -> _Layer:
        config, read, name = self.config, self._read, f"layers.{index}"
        size, inner = config.hidden_size, config.intermediate_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {f"{name}.self_attn.{part}_proj": rows for part, rows in (("q", query), ("k", key), ("v", key))}
        norms = [self._factor(f"{name}.self_attn.{part}_norm", config.head_dim) for part in "qk"]
        following = "norm" if index + 1 == config.num_layers else f"layers.{index + 1}.input_layernorm"
        return _Layer(
            attention=RotaryAttention(
                qkv=Linear(read.stacked(qkv, size)),
                rope=replace(rope, weight=torch.stack(norms)),
                output=read.linear(f"{name}.self_attn.o_proj", size, query),
                local=window_attention(self.attention_spec, config.windows[index]),
            ),
            attended_norm=self._norm(f"{name}.post_attention_layernorm"),
            mlp_norm=self._norm(f"{name}.pre_feedforward_layernorm"),
            mlp=GatedUnit(
                gate_up=Linear(
                    read.stacked({f"{name}.mlp.{part}_proj": inner for part in ("gate", "up")}, size)
                ),
                narrow=read.linear(f"{name}.mlp.down_proj", size, inner),
                activation="gelu_tanh",
            ),
            widened_norm=self._norm(f"{name}.post_feedforward_layernorm"),
            next_norm=self._norm(following),
        )
