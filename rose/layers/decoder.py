"""Qwen3's layer and its elders' (Qwen2, Llama), bidirectional or causal: the attention backend knows which.

Source: Qwen3 technical report, arXiv 2505.09388; transformers' modeling_qwen3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.attention.base import ProductAttention
from rose.buckets import sequence_bucket
from rose.kernels.norm import RmsNorm, add_rms_norm
from rose.kernels.one_query import PickedRows, one_query_attention
from rose.kernels.rope import QkRope, qk_norm_rope
from rose.layers.projection import GatedProjection, Projection
from rose.layers.tensors import TensorReader

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch
    from rose.kernels.gemm import WeightKey
    from rose.kernels.one_query import OneQuery
    from rose.layers.workspace import DecoderBuffers
    from rose.weights import WeightSource


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and SwiGLU. On a GPU: 4 products, 4 fused kernels and attention.

    Called in three steps, `project`, `attend` and `mix`. In the last layer of a model that pools single rows
    `pick` comes in the place of `attend`, and `mix` takes those rows alone.
    input_norm is applied by whoever fills buffers.hidden: it is fused with what comes before this layer.
    """

    input_norm: RmsNorm
    qkv: Projection
    rope: QkRope
    output: Projection
    mlp_norm: RmsNorm
    gate_up: GatedProjection
    down: Projection

    def project(self, rows: DecoderBuffers) -> Tensor:
        """The QKV product of rows.hidden, input_norm(residual): rows.qkv, or partials in rows.partials."""
        return self.qkv(rows.hidden, rows.qkv, rows.partials)

    def follow(self, mixed: Tensor | None, rows: DecoderBuffers) -> Tensor:
        """`project` after another layer, whose `mix` returned `mixed`; that is added to rows.residual."""
        add_rms_norm(mixed, rows.residual, self.input_norm, rows.hidden)
        return self.project(rows)

    def rotate(self, product: Tensor, rows: DecoderBuffers) -> None:
        """What `project` returned to rows.qkv, normed and rotated."""
        qk_norm_rope(product, rows.positions, self.rope, rows.qkv)

    def attend(self, batch: DeviceBatch, buffers: DecoderBuffers, product: Tensor | None) -> None:
        """Attention of all rows to buffers.context; padded rows may keep what they held.

        product: what `project` returned; None: buffers.qkv holds q and k normed and rotated already.
        """
        attend(self.rope, batch, buffers, product)

    def pick(
        self, batch: DeviceBatch, buffers: DecoderBuffers, product: Tensor | None, query: OneQuery
    ) -> DecoderBuffers:
        """Buffers of R rows, S <= R <= T: each sequence's of `query`, then any, with what `mix` reads.

        product: as of `attend`.
        """
        return pick(self.rope, batch, buffers, product, query)

    def mix(self, rows: DecoderBuffers) -> Tensor | None:
        """rows.context through the rest of the layer.

        Adds the attention's part to rows.residual and returns what is still to be added: None, rows.hidden,
        or split-K partial sums [K, T, H] in rows.partials. Use it before the next product.
        """
        mixed = self.output.add(rows.context, rows.residual, rows.hidden, rows.partials)
        add_rms_norm(mixed, rows.residual, self.mlp_norm, rows.hidden)
        gated = self.gate_up(rows.hidden, rows.wide, rows.narrow, rows.partials)
        return self.down.add(gated, rows.residual, rows.hidden, rows.partials)


def attend(rope: QkRope, batch: DeviceBatch, buffers: DecoderBuffers, product: Tensor | None) -> None:
    """See DecoderLayer.attend."""
    num_tokens, attention = batch.num_tokens, batch.attention
    context = buffers.context.view(num_tokens, rope.num_heads, rope.head_dim)
    if product is not None and isinstance(attention, ProductAttention):
        attention.forward_product(product, rope, context, batch.cu_seqlens)
        return
    if product is not None:
        qk_norm_rope(product, buffers.positions, rope, buffers.qkv)
    attention.forward(*_heads(buffers.qkv, rope), context, batch.cu_seqlens, batch.max_seqlen)


def pick(
    rope: QkRope, batch: DeviceBatch, buffers: DecoderBuffers, product: Tensor | None, query: OneQuery
) -> DecoderBuffers:
    """See DecoderLayer.pick. Whatever the batch's attention is, q, k and v are those in buffers.qkv."""
    if product is not None:
        qk_norm_rope(product, buffers.positions, rope, buffers.qkv)
    num_seqs = batch.num_seqs
    picked = buffers.picked(min(sequence_bucket(num_seqs), batch.num_tokens))
    out = PickedRows(picked.context[:num_seqs], picked.residual[:num_seqs], picked.scratch)
    one_query_attention(_heads(buffers.qkv, rope), buffers.residual, batch.cu_seqlens, query, out)
    return picked


def _heads(qkv: Tensor, rope: QkRope) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hk, D] of qkv [T, (Hq + 2 Hk) D]."""
    heads = qkv.view(len(qkv), -1, rope.head_dim)
    q, k, v = torch.split(heads, [rope.num_heads, rope.num_kv_heads, rope.num_kv_heads], dim=1)
    return q, k, v


def weight_keys(config: ModelConfig) -> tuple[WeightKey, ...]:
    """Of a layer's four products: QKV, attention output, gate and up, down."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        (query + 2 * key, hidden, "sum"),
        (hidden, query, "sum"),
        (2 * inner, hidden, "swiglu"),
        (hidden, inner, "sum"),
    )


@dataclass(frozen=True, slots=True)
class ProductNames:
    """A layer's products by Hugging Face's names. qkv, gate_up: with the rows of each part."""

    qkv: dict[str, int]
    output: str
    gate_up: dict[str, int]
    down: str

    @classmethod
    def of(cls, config: ModelConfig, index: int) -> ProductNames:
        """Those of layer `index`."""
        attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return cls(
            {f"{attention}.{part}_proj": rows for part, rows in (("q", query), ("k", key), ("v", key))},
            f"{attention}.o_proj",
            {f"{mlp}.{part}_proj": config.intermediate_size for part in ("gate", "up")},
            f"{mlp}.down_proj",
        )


class DecoderReader:
    """Reads decoder layers by Hugging Face's tensor names. tensor: reads any other tensor."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self.tensor = TensorReader(weights, dtype, device)

    def norm(self, name: str) -> RmsNorm:
        """An RMSNorm over the hidden size."""
        return RmsNorm(self.tensor(name, self._config.hidden_size), self._config.norm_eps)

    def layer(self, index: int, cos_sin: Tensor) -> DecoderLayer:
        """Layer `index`; cos_sin from `rope_table` is shared by all."""
        config, name, names = self._config, f"layers.{index}", ProductNames.of(self._config, index)
        size, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        return DecoderLayer(
            input_norm=self.norm(f"{name}.input_layernorm.weight"),
            qkv=Projection(self.tensor.stacked(names.qkv, size)),
            rope=self.rope(index, cos_sin),
            output=Projection(self.tensor(f"{names.output}.weight", size, query)),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm.weight"),
            gate_up=GatedProjection(self.tensor.stacked(names.gate_up, size)),
            down=Projection(self.tensor(f"{names.down}.weight", size, inner)),
        )

    def rope(self, index: int, cos_sin: Tensor) -> QkRope:
        """What happens to the queries and keys of layer `index`."""
        attention = f"layers.{index}.self_attn"
        config = self._config
        weight = bias = None
        if config.architecture == "qwen3":
            weight = torch.stack(
                [self.tensor(f"{attention}.{part}_norm.weight", config.head_dim) for part in "qk"]
            )
        if config.attention_bias:
            heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
            biases = [
                self.tensor(f"{attention}.{part}_proj.bias", count * config.head_dim)
                for part, count in heads.items()
            ]
            bias = torch.cat(biases)
        return QkRope(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
            weight=weight,
            cos_sin=cos_sin,
            bias=bias,
        )
