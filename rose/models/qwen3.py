"""Qwen3 that embeds: pplx-embed (bidirectional, mean), Qwen3-Embedding (causal, last). Wiring only.

Source: Qwen3 technical report, arXiv 2505.09388; pplx-embed's modeling.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.attention.base import AttentionSpec
from rose.kernels.dispatch import early_launches
from rose.kernels.embedding import EmbeddedTokens, embed_tokens
from rose.kernels.gemm import launches_early, partial_elements, row_counts
from rose.kernels.norm import add_rms_norm
from rose.kernels.pooling import LastHidden, norm_gather_rows, norm_mean_pool, pool_scratch
from rose.kernels.rope import rope_table
from rose.layers.compile_ahead import compile_ahead
from rose.layers.decoder import DecoderReader, weight_keys
from rose.layers.workspace import Workspace, passes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
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
        self.attention_spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            causal=config.causal,
            dtype=dtype,
            device=device,
        )
        read = DecoderReader(config, weights, dtype, device)
        cos_sin = rope_table(config.head_dim, config.rope_theta, config.max_positions, device)
        self._table = read.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [read.layer(index, cos_sin) for index in range(config.num_layers)]
        self._norm = read.norm("norm.weight")
        self._keys = keys = weight_keys(config)
        partials = max(map(partial_elements, keys))
        self._workspace = Workspace(config, max_tokens, dtype, device, partials)
        self._scratch = pool_scratch(config.hidden_size, device)
        if device.type == "cuda":
            compile_ahead(self, {min(count, max_tokens) for count in (*row_counts(keys), max_tokens)})

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        """Write the pooled vectors of `batch`, a row a sequence, to `outputs`."""
        with early_launches(launches_early(batch.num_tokens, self._keys)):
            self._forward(batch, outputs)

    def _forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        buffers = self._workspace.rows(batch.num_tokens)
        embedded = EmbeddedTokens(buffers.residual, buffers.hidden, buffers.positions)
        first = self._layers[0]
        embed_tokens(batch.input_ids, batch.cu_seqlens, self._table, first.input_norm, embedded)
        parts = [buffers.rows(start, stop) for start, stop in passes(batch.num_tokens)]
        for rows in parts:
            first.project(rows)
        for layer, following in zip(self._layers, [*self._layers[1:], None], strict=True):
            layer.attend(batch, buffers)
            for rows in parts:
                x = layer.mix(rows)
                if following is not None:
                    add_rms_norm(x, rows.residual, following.input_norm, rows.hidden)
                    following.project(rows)
        # Passes of more than one are too long for split-K: together their results are buffers.hidden.
        self._pool(x if len(parts) == 1 else buffers.hidden, batch, buffers, outputs)

    def _pool(self, x: Tensor, batch: DeviceBatch, buffers: DecoderBuffers, outputs: Outputs) -> None:
        last = LastHidden(x, buffers.residual, self._norm)
        if self.config.pooling == "mean":
            norm_mean_pool(last, batch.cu_seqlens, outputs, self._scratch)
        else:
            which: Which = "last" if self.config.pooling == "last" else "first"
            norm_gather_rows(last, batch.cu_seqlens, which, outputs)
