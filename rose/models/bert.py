"""BERT, RoBERTa and XLM-R encoders: MiniLM, bge, e5 and their kin. Wiring only.

Source: Devlin et al., arXiv 1810.04805; tensor names as in transformers' modeling_bert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.attention.base import AttentionSpec
from rose.device_batch import DeviceBatch, Outputs
from rose.heads.embedding import EmbeddingHead
from rose.kernels.embedding import embed_bert
from rose.layers.encoder import EncoderBuffers, EncoderReader
from rose.layers.length_order import sorted_by_length

if TYPE_CHECKING:
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
        read = EncoderReader(config, weights, dtype, device)
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
