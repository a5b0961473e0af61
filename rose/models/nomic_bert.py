"""Nomic BERT (nomic-embed-text): BERT with rotation, SwiGLU and no biases. Wiring only.

Source: Nussbaum et al., arXiv 2402.01613; transformers' modeling_nomic_bert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.heads.embedding import EmbeddingHead
from rose.kernels.embedding import BertTables, embed_bert, write_positions
from rose.kernels.norm import LayerNorm, add_layer_norm
from rose.layers.activations import ActivationMemory, Activations
from rose.layers.compile_ahead import compile_ahead, row_counts
from rose.layers.linear import Linear
from rose.layers.rotary import GatedUnit, RotaryAttention, attention_spec, layer_ropes, run_encoder
from rose.layers.tensors import TensorReader

if TYPE_CHECKING:
    import torch

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.kernels.rope import QkRope
    from rose.weights import WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: RotaryAttention
    attention_norm: LayerNorm
    mlp: GatedUnit
    mlp_norm: LayerNorm

    def __call__(self, batch: DeviceBatch, rows: Activations) -> None:
        """rows.hidden through the layer."""
        hidden = rows.hidden
        add_layer_norm(self.attention(hidden, batch, rows), hidden, None, self.attention_norm, hidden)
        add_layer_norm(self.mlp(hidden, rows), hidden, None, self.mlp_norm, hidden)


class NomicBertModel:
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
        read = TensorReader(weights, dtype, device)
        norm = read.layer_norm("emb_ln", config.hidden_size, config.norm_eps)
        word = read("embeddings.word_embeddings.weight", config.vocab_size, config.hidden_size)
        types = read("embeddings.token_type_embeddings.weight", config.type_vocab_size, config.hidden_size)
        self._tables = BertTables(word, None, types, norm)
        ropes = layer_ropes(config, device)
        self._layers = [_layer(read, config, index, rope) for index, rope in enumerate(ropes)]
        self._head = EmbeddingHead(config, device)
        self._memory = ActivationMemory(config, max_tokens, dtype, device)
        if device.type == "cuda":
            compile_ahead(self, row_counts((), max_tokens))

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Write the pooled vectors of `batch`, a row a sequence, to `outputs`."""
        run_encoder(self._run, batch, outputs, self.attention_spec.device)

    def _run(self, batch: DeviceBatch, outputs: Outputs) -> None:
        rows = self._memory.rows(batch.num_tokens)
        embed_bert(batch.input_ids, batch.cu_seqlens, batch.token_type_ids, self._tables, rows.hidden)
        write_positions(batch.cu_seqlens, rows.positions)
        for layer in self._layers:
            layer(batch, rows)
        self._head(rows.hidden, batch.bounds, self._head.which, outputs)


def _layer(read: TensorReader, config: ModelConfig, index: int, rope: QkRope) -> _Layer:
    """By the names of the published files, which transformers keeps when it saves: q, k and v in one."""
    size, inner, name = config.hidden_size, config.intermediate_size, f"encoder.layers.{index}"
    gate_up = read.stacked({f"{name}.mlp.fc12": inner, f"{name}.mlp.fc11": inner}, size)
    return _Layer(
        attention=RotaryAttention(
            qkv=read.linear(f"{name}.attn.Wqkv", 3 * size, size),
            rope=rope,
            output=read.linear(f"{name}.attn.out_proj", size, size),
        ),
        attention_norm=read.layer_norm(f"{name}.norm1", size, config.norm_eps),
        mlp=GatedUnit(Linear(gate_up), read.linear(f"{name}.mlp.fc2", size, inner), "silu"),
        mlp_norm=read.layer_norm(f"{name}.norm2", size, config.norm_eps),
    )
