"""BERT, RoBERTa and XLM-R encoders: MiniLM, bge, e5 and their kin. Wiring only.

Source: Devlin et al., arXiv 1810.04805; tensor names as in transformers' modeling_bert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.attention.base import AttentionSpec
from rose.device_batch import DeviceBatch, Outputs
from rose.heads.embedding import EmbeddingHead
from rose.kernels.embedding import BertTables, embed_bert
from rose.kernels.norm import LayerNorm
from rose.layers.encoder import DenseAddNorm, EncoderBuffers, EncoderLayer
from rose.layers.length_order import sorted_by_length
from rose.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.weights import WeightSource


class BertModel:
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
        self.attention_spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            causal=config.causal,
            dtype=dtype,
            device=device,
        )
        read = _Reader(config, weights, dtype, device)
        self._tables = read.tables()
        self._layers = [read.layer(index) for index in range(config.num_layers)]
        self._head = EmbeddingHead(config, device)
        self._on_cpu = device.type == "cpu"
        self._buffers = EncoderBuffers()
        if not self._on_cpu:
            self._buffers = EncoderBuffers.allocate(config, max_tokens, dtype, device)

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Write the pooled vectors of `batch`, a row a sequence, to `outputs`."""
        rows = None
        if self._on_cpu:
            batch, rows = sorted_by_length(batch)
        if rows is None:
            self._run(batch, outputs)
            return
        int8 = None if outputs.int8 is None else torch.empty_like(outputs.int8)
        by_length = Outputs(torch.empty_like(outputs.vectors), int8)
        self._run(batch, by_length)
        outputs.vectors[rows] = by_length.vectors
        if outputs.int8 is not None and by_length.int8 is not None:
            outputs.int8[rows] = by_length.int8

    def _run(self, batch: DeviceBatch, outputs: Outputs) -> None:
        buffers, word = self._buffers.rows(batch.num_tokens), self._tables.word
        hidden = buffers.hidden
        if hidden is None:
            hidden = word.new_empty(batch.num_tokens, word.shape[1])
        embed_bert(batch.input_ids, batch.cu_seqlens, batch.token_type_ids, self._tables, hidden)
        for layer in self._layers:
            hidden = layer(hidden, batch, buffers)
        self._head(hidden, batch.cu_seqlens, outputs)


class _Reader:
    """Makes the parts of the model from tensors named as Hugging Face names them."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._weights = weights
        self._place = (device, dtype)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.tensor(name, shape).to(*self._place)

    def dense(self, name: str, height: int, width: int) -> tuple[Tensor, Tensor]:
        return self.tensor(f"{name}.weight", height, width), self.tensor(f"{name}.bias", height)

    def norm(self, name: str) -> LayerNorm:
        size = self._config.hidden_size
        weight, bias = (self.tensor(f"{name}.LayerNorm.{part}", size) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, self._config.norm_eps)

    def tables(self) -> BertTables:
        config = self._config
        word, position, token_type = (
            self.tensor(f"embeddings.{name}_embeddings.weight", rows, config.hidden_size)
            for name, rows in (
                ("word", config.vocab_size),
                ("position", config.max_positions),
                ("token_type", config.type_vocab_size),
            )
        )
        return BertTables(word, position, token_type, self.norm("embeddings"), config.position_offset)

    def layer(self, index: int) -> EncoderLayer:
        size, inner, name = self._config.hidden_size, self._config.intermediate_size, f"encoder.layer.{index}"
        qkv = [self.dense(f"{name}.attention.self.{part}", size, size) for part in ("query", "key", "value")]
        attention_output = self.dense(f"{name}.attention.output.dense", size, size)
        output = self.dense(f"{name}.output.dense", size, inner)
        return EncoderLayer(
            qkv=Linear(torch.cat([weight for weight, _ in qkv]), torch.cat([bias for _, bias in qkv])),
            attention_output=DenseAddNorm(*attention_output, self.norm(f"{name}.attention.output")),
            widen=Linear(*self.dense(f"{name}.intermediate.dense", inner, size)),
            output=DenseAddNorm(*output, self.norm(f"{name}.output")),
            num_heads=self._config.num_heads,
            head_dim=self._config.head_dim,
        )
