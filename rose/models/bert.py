"""BERT, RoBERTa and XLM-R encoders: MiniLM, bge, e5 and their kin. Wiring only.

Source: Devlin et al., arXiv 1810.04805; tensor names as in transformers' modeling_bert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rose.heads.embedding import EmbeddingHead
from rose.heads.splade import SpladeHead
from rose.heads.tokens import TokenHeads
from rose.kernels.early import early_for, launching
from rose.kernels.embedding import embed_bert
from rose.kernels.fused import gains_early
from rose.kernels.gemm import fetches_early
from rose.kernels.one_query import OneQuery
from rose.kernels.token_qkv import BertQkvTables, embed_bert_qkv
from rose.layers.compile_ahead import compile_ahead, row_counts
from rose.layers.encoder import EncoderBuffers, EncoderLayer, EncoderReader, attend, weight_keys
from rose.layers.encoder_stack import EncoderStack
from rose.layers.fp8_encoder import Fp8EncoderLayer, read_layer
from rose.layers.fp8_weights import Fp8Weights
from rose.layers.length_order import run_by_length
from rose.layers.rotary import attention_spec
from rose.layers.token_qkv import bert_qkv_tables

if TYPE_CHECKING:
    import torch

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.kernels.gemm import WeightKey
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
        self.attention_spec = attention_spec(config, dtype, device)
        read = EncoderReader(config, weights, dtype, device)
        self._tables = read.tables()
        self._heads = config.num_heads, config.head_dim
        self._layers: list[EncoderLayer | Fp8EncoderLayer]
        self._stack: EncoderStack | None = None
        self._first_qkv: BertQkvTables | None = None
        self._keys: tuple[WeightKey, ...] = ()  # products in FP8 have no plans
        if isinstance(weights, Fp8Weights):
            self._layers = [read_layer(read, weights, config, index) for index in range(config.num_layers)]
        else:
            layers = [read.layer(index) for index in range(config.num_layers)]
            self._layers = [*layers]
            self._stack = EncoderStack.of(layers, self.attention_spec)
            self._keys = weight_keys(config)
        self._head: EmbeddingHead | SpladeHead
        if config.pooling == "splade":
            self._head = SpladeHead(config, weights, self._tables.word)
        else:
            self._head = EmbeddingHead(config, device, TokenHeads.read(config, weights, device))
        which = self._head.which
        self._query = None if which is None else OneQuery(which, self.attention_spec.scale)
        self._on_cpu = device.type == "cpu"
        self._buffers = EncoderBuffers()
        if not self._on_cpu:
            self._buffers = EncoderBuffers.allocate(config, max_tokens, dtype, device)
        self._prepare_ends(read)
        if device.type == "cuda":
            compile_ahead(self, row_counts(self._keys, max_tokens))

    def _prepare_ends(self, read: EncoderReader) -> None:
        """What the first and the last layer can do without a product of all rows, but for those in FP8."""
        first, last = self._layers[0], self._layers[-1]
        if isinstance(first, EncoderLayer) and first is not last:  # the only one may take single rows
            self._first_qkv = bert_qkv_tables(self._tables, first.qkv.weight, first.qkv.bias)
        if isinstance(last, EncoderLayer) and self._query is not None:
            self._layers[-1] = replace(last, absorbed=read.absorbed(last, self.config.num_layers - 1))

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Write the pooled vectors of `batch`, a row a sequence, to `outputs`."""
        if self._on_cpu:
            run_by_length(batch, outputs, self._run)
            return
        num_tokens, keys = batch.num_tokens, self._keys
        fetches, gains = fetches_early(num_tokens, keys), gains_early(num_tokens, keys)
        with launching(early_for(num_tokens, fetches, self.attention_spec.device, gains)):
            self._run(batch, outputs)

    def in_one_launch(self, num_tokens: int) -> bool:
        """See OneLaunch."""
        return self._stack is not None and self._stack.takes(num_tokens)

    def _run(self, batch: DeviceBatch, outputs: Outputs) -> None:
        buffers, word = self._buffers.rows(batch.num_tokens), self._tables.word
        hidden = buffers.hidden
        if hidden is None:
            hidden = word.new_empty(batch.num_tokens, word.shape[1])
        if self._stack is not None and self.in_one_launch(batch.num_tokens):
            embed_bert(batch.input_ids, batch.cu_seqlens, batch.token_type_ids, self._tables, hidden)
            self._stack(batch, hidden, buffers)
            self._head(hidden, batch.bounds, self._head.which, outputs)
            return
        qkv = self._embed(batch, hidden, buffers)
        *earlier, last = self._layers
        for layer in earlier:
            if qkv is None:
                context = layer.attend(hidden, batch, buffers)
            else:
                context, qkv = attend(qkv, self._heads, batch, buffers), None
            hidden = layer.mix(context, hidden, buffers)
        which, query = self._head.which, self._query
        # More sequences than rows are padding; then there is nothing to pick.
        if query is None or batch.num_seqs > batch.num_tokens or outputs.tokens:
            mixed = last.mix(last.attend(hidden, batch, buffers), hidden, buffers)
        else:
            mixed, which = last.mix(*last.pick(hidden, batch, buffers, query)), "only"
        self._head(mixed, batch.bounds, which, outputs)

    def _embed(
        self, batch: DeviceBatch, hidden: torch.Tensor, buffers: EncoderBuffers
    ) -> torch.Tensor | None:
        """The embeddings, to hidden [T, H]; the first layer's QKV [T, 3H] of them where tables give it."""
        ids, types = batch.input_ids, batch.token_type_ids
        if self._first_qkv is None or buffers.qkv is None:
            embed_bert(ids, batch.cu_seqlens, types, self._tables, hidden)
            return None
        tables = self._tables, self._first_qkv
        embed_bert_qkv(ids, batch.cu_seqlens, types, tables, (hidden, buffers.qkv))
        return buffers.qkv
