"""ModernBERT: pre-norm, GeGLU, and layers of which two in three see only a window. Wiring only.

Source: Warner et al., arXiv 2412.13663; transformers' modeling_modernbert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.heads.embedding import EmbeddingHead
from rose.kernels.embedding import BertTables, embed_bert, write_positions
from rose.kernels.norm import LayerNorm, add_pre_layer_norm
from rose.layers.activations import ActivationMemory
from rose.layers.compile_ahead import compile_ahead, row_counts
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
    import torch

    from rose.attention.base import AttentionSpec
    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.kernels.rope import QkRope
    from rose.weights import WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    """next_norm: what follows, be it the next layer's first norm or the model's last."""

    attention: RotaryAttention
    mlp_norm: LayerNorm
    mlp: GatedUnit
    next_norm: LayerNorm


class ModernBertModel:
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
        self.attention_spec = spec = attention_spec(config, dtype, device)
        read = TensorReader(weights, dtype, device)
        word = read("embeddings.tok_embeddings.weight", config.vocab_size, config.hidden_size)
        self._tables = BertTables(word, None, None, _norm(read, config, "embeddings.norm"))
        ropes = layer_ropes(config, device)
        self._layers = [_layer(read, config, spec, index, rope) for index, rope in enumerate(ropes)]
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
        embed_bert(batch.input_ids, batch.cu_seqlens, None, self._tables, residual)
        write_positions(batch.cu_seqlens, rows.positions)
        x = residual  # the embeddings are normed already: the first layer has no norm of its own
        for layer in self._layers:
            add_pre_layer_norm(layer.attention(x, batch, rows), residual, None, layer.mlp_norm, hidden)
            add_pre_layer_norm(layer.mlp(hidden, rows), residual, None, layer.next_norm, hidden)
            x = hidden
        self._head(hidden, batch.bounds, self._head.which, outputs)


def _layer(read: TensorReader, config: ModelConfig, spec: AttentionSpec, index: int, rope: QkRope) -> _Layer:
    size, inner, name = config.hidden_size, config.intermediate_size, f"layers.{index}"
    following = "final_norm" if index + 1 == config.num_layers else f"layers.{index + 1}.attn_norm"
    return _Layer(
        attention=RotaryAttention(
            qkv=read.linear(f"{name}.attn.Wqkv", 3 * size, size, config.attention_bias),
            rope=rope,
            output=read.linear(f"{name}.attn.Wo", size, size, config.attention_bias),
            local=window_attention(spec, config.windows[index]),
        ),
        mlp_norm=_norm(read, config, f"{name}.mlp_norm"),
        mlp=GatedUnit(
            gate_up=read.linear(f"{name}.mlp.Wi", 2 * inner, size, config.mlp_bias),
            narrow=read.linear(f"{name}.mlp.Wo", size, inner, config.mlp_bias),
            activation="gelu",
        ),
        next_norm=_norm(read, config, following),
    )


def _norm(read: TensorReader, config: ModelConfig, name: str) -> LayerNorm:
    return read.layer_norm(name, config.hidden_size, config.norm_eps, config.norm_bias)
