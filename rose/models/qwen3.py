"""Qwen3 that embeds: pplx-embed (bidirectional, mean), Qwen3-Embedding (causal, last). Wiring only.

Source: Qwen3 technical report, arXiv 2505.09388; pplx-embed's modeling.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rose.heads.tokens import TokenHeads
from rose.kernels.early import early_for, launching
from rose.kernels.embedding import EmbeddedTokens, embed_tokens
from rose.kernels.fused import fused_gemm, gains_early
from rose.kernels.gemm import fetches_early, partial_elements
from rose.kernels.norm import add_rms_norm
from rose.kernels.one_query import OneQuery
from rose.kernels.pooling import LastHidden, norm_gather_rows, norm_mean_pool, pool_scratch
from rose.kernels.rope import rope_table
from rose.kernels.token_qkv import QkvRows, RotaryQkvTable, embed_rotary_qkv
from rose.layers.compile_ahead import compile_ahead, row_counts
from rose.layers.decoder import DecoderLayer, DecoderReader, weight_keys
from rose.layers.decoder_stack import DecoderStack
from rose.layers.fp8_decoder import Fp8DecoderLayer, read_layer
from rose.layers.fp8_weights import Fp8Weights
from rose.layers.fused_decoder import FusedDecoder
from rose.layers.rotary import attention_spec
from rose.layers.token_qkv import rotary_qkv_table
from rose.layers.workspace import Workspace

if TYPE_CHECKING:
    import torch

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.kernels.gemm import WeightKey
    from rose.kernels.pooling import Which
    from rose.layers.workspace import DecoderBuffers
    from rose.weights import WeightSource


class Qwen3Model:
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
        in_fp8 = isinstance(weights, Fp8Weights) and config.architecture == "qwen3"
        self.attention_spec = replace(attention_spec(config, dtype, device), fp8=in_fp8)
        which: Which = "last" if config.pooling == "last" else "first"
        self._query = OneQuery(which, self.attention_spec.scale, self.attention_spec.causal)
        read = DecoderReader(config, weights, dtype, device)
        cos_sin = rope_table(
            config.head_dim, config.rope_theta, config.max_positions, device, config.rope_scaling
        )
        self._table = read.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers: list[DecoderLayer | Fp8DecoderLayer]
        self._fused: FusedDecoder | None = None
        self._stack: DecoderStack | None = None
        self._first_qkv: RotaryQkvTable | None = None
        self._keys: tuple[WeightKey, ...] = ()  # products in FP8 have no plans
        indices = range(config.num_layers)
        if isinstance(weights, Fp8Weights):
            self._layers = [read_layer(read, weights, config, index, cos_sin) for index in indices]
        else:
            layers = [read.layer(index, cos_sin) for index in indices]
            self._layers = [*layers]
            self._fused = FusedDecoder.of(layers, max_tokens, fused_gemm)
            self._stack = DecoderStack.of(layers, self.attention_spec)
            self._keys = weight_keys(config)
        self._norm = read.norm("norm.weight")
        partials = max(map(partial_elements, self._keys), default=0)
        self._workspace = Workspace(config, max_tokens, dtype, device, partials)
        self._scratch = pool_scratch(config.hidden_size, device)
        first = self._layers[0]
        if isinstance(first, DecoderLayer):
            self._first_qkv = rotary_qkv_table(self._table, first.input_norm, first.qkv.weight, first.rope)
        if device.type == "cuda":
            compile_ahead(self, row_counts(self._keys, max_tokens))

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Write the pooled vectors of `batch`, a row a sequence, to `outputs`."""
        num_tokens, keys = batch.num_tokens, self._keys
        fetches, gains = fetches_early(num_tokens, keys), gains_early(num_tokens, keys)
        with launching(early_for(num_tokens, fetches, self.attention_spec.device, gains)):
            self._run(batch, self._workspace.rows(batch.num_tokens), outputs)

    def in_one_launch(self, num_tokens: int) -> bool:
        """See OneLaunch."""
        return self._stack is not None and self._stack.takes(num_tokens)

    def _run(self, batch: DeviceBatch, rows: DecoderBuffers, outputs: Outputs) -> None:
        if self._stack is not None and self.in_one_launch(batch.num_tokens):
            self._embed(batch, rows)
            self._pool(batch, rows, self._stack(batch, rows), outputs)
            return
        last, fused, num_tokens = self._layers[-1], self._fused, len(rows.hidden)
        whole = fused is not None and fused.takes(num_tokens)
        if fused is not None and not whole and not fused.takes_heads(num_tokens):
            fused = None
        product = self._begin(batch, rows, fused)
        for index, (layer, following) in enumerate(pairwise(self._layers)):
            layer.attend(batch, rows, product)
            if fused is None:
                product = following.follow(layer.mix(rows), rows)
                continue
            product = None
            if whole:
                fused.step(index, rows)
            else:
                fused.follow(index, layer.mix(rows), rows)
        # More sequences than rows are padding; then there is nothing to pick.
        if self.config.pooling == "mean" or batch.num_seqs > batch.num_tokens or outputs.tokens:
            last.attend(batch, rows, product)
            self._pool(batch, rows, last.mix(rows), outputs)
            return
        picked = last.pick(batch, rows, product, self._query)
        hidden = LastHidden(last.mix(picked), picked.residual, self._norm)
        norm_gather_rows(hidden, batch.cu_seqlens, "only", outputs)

    def _embed(self, batch: DeviceBatch, rows: DecoderBuffers) -> None:
        """The embeddings, to rows.residual and, normed, rows.hidden, and rows.positions."""
        embedded = EmbeddedTokens(rows.residual, rows.hidden, rows.positions)
        norm = self._layers[0].input_norm
        embed_tokens(batch.input_ids, batch.cu_seqlens, self._table, norm, embedded)

    def _begin(
        self, batch: DeviceBatch, rows: DecoderBuffers, fused: FusedDecoder | None
    ) -> torch.Tensor | None:
        """The embeddings and the first layer's product, as `attend` takes it; None: rows.qkv is rotated."""
        if self._first_qkv is None:
            self._embed(batch, rows)
            if fused is not None and fused.begin(rows):
                return None
            return self._layers[0].project(rows)
        out = QkvRows(rows.residual, rows.qkv, rows.positions)
        embed_rotary_qkv(batch.input_ids, batch.cu_seqlens, self._table, self._first_qkv, out)
        if fused is not None:
            fused.prepare(rows)
        return None

    def _pool(
        self, batch: DeviceBatch, rows: DecoderBuffers, mixed: torch.Tensor | None, outputs: Outputs
    ) -> None:
        """From what the last layer's `mix` returned of all rows."""
        hidden = LastHidden(mixed, rows.residual, self._norm)
        if self.config.pooling == "mean":
            norm_mean_pool(hidden, batch.bounds, outputs, self._scratch)
        else:
            norm_gather_rows(hidden, batch.cu_seqlens, self._query.which, outputs)
        self._give_tokens(hidden, rows, outputs)

    def _give_tokens(self, last: LastHidden, rows: DecoderBuffers, outputs: Outputs) -> None:
        """Write what is wanted of each token, last of all: it changes rows."""
        if outputs.tokens:
            add_rms_norm(last.x, last.residual, self._norm, rows.hidden)
            TokenHeads()(rows.hidden, outputs.tokens)
