"""BERT's layer: attention and a feed-forward part, each followed by an addition and a LayerNorm (post-norm).

Every part takes the tensor to write to; None lets it make one. On a GPU all of them are given, so that
nothing is allocated; on a CPU none is, because oneDNN makes its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import layer_norm

from rose.buckets import sequence_bucket
from rose.kernels.absorbed import AbsorbedHeads, absorbed_attention, absorbs
from rose.kernels.embedding import BertTables
from rose.kernels.fused import FusedLookup, fused_gemm
from rose.kernels.gemm import partial_elements
from rose.kernels.norm import LayerNorm, add_layer_norm
from rose.kernels.one_query import PickedRows, one_query_attention, one_query_scratch
from rose.layers.linear import Linear
from rose.layers.projection import BiasedProjection, Projection
from rose.layers.tensors import TensorReader

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch
    from rose.kernels.gemm import WeightKey
    from rose.kernels.one_query import OneQuery
    from rose.weights import WeightSource


@dataclass(frozen=True, slots=True)
class EncoderBuffers:
    """Activations of one forward on a GPU, reused by every layer.

    hidden, attended, context, dense: [T, H]. qkv: [T, 3H]. wide: [T, I]. partials: flat, for the partial sums
    of split-K products. scratch: of attention of one query a sequence. On a CPU all are None.
    """

    hidden: Tensor | None = None
    attended: Tensor | None = None
    context: Tensor | None = None
    dense: Tensor | None = None
    qkv: Tensor | None = None
    wide: Tensor | None = None
    partials: Tensor | None = None
    scratch: Tensor | None = None

    @classmethod
    def allocate(
        cls, config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> EncoderBuffers:
        """Buffers for batches of up to `max_tokens` tokens: (7 H + I) elements a token.

        Zeros, because attention skips padded rows and a NaN left there would spread through 0 * NaN.
        """
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = (hidden, hidden, hidden, hidden, 3 * hidden, inner)
        rows = (torch.zeros(max_tokens, width, dtype=dtype, device=device) for width in widths)
        partials = max(map(partial_elements, weight_keys(config)))
        return replace(
            cls(*rows),
            partials=torch.zeros(partials, dtype=dtype, device=device),
            scratch=one_query_scratch(config.head_dim, device),
        )

    def rows(self, num_tokens: int) -> EncoderBuffers:
        """Views of the first `num_tokens` rows; partials and scratch are shared.

        Raises:
            ValueError: there are fewer.
        """
        if self.hidden is not None and num_tokens > len(self.hidden):
            raise ValueError(f"batch has {num_tokens} tokens; the buffers hold {len(self.hidden)}")
        if self.hidden is None:
            return self
        names = (field.name for field in fields(self) if field.name not in ("partials", "scratch"))
        return replace(self, **{name: getattr(self, name)[:num_tokens] for name in names})

    def picked(self, num_rows: int) -> EncoderBuffers:
        """Buffers of R <= T rows, one a sequence or more, for the last layer from its attention on.

        hidden and attended change places, so that rows of hidden can be copied while all of them are there.
        """
        few = self.rows(num_rows)
        return replace(few, hidden=few.attended, attended=few.hidden)


class DenseAddNorm:
    """LayerNorm(x Wᵀ + b + residual): one product and one pass.

    weight: [H, in], kept as by Projection. bias: [H].
    """

    def __init__(
        self, weight: Tensor, bias: Tensor, norm: LayerNorm, lookup: FusedLookup = fused_gemm
    ) -> None:
        # The GPU's kernel adds bias and partial sums as it normalises; the CPU's product bias and residual.
        self._kernel_bias = bias if weight.is_cuda else None
        self._projection = Projection(weight, lookup=lookup) if weight.is_cuda else None
        self._linear = Linear(weight, None if weight.is_cuda else bias)
        self.weight = None if self._projection is None else self._projection.weight
        self.bias = bias
        self.norm = norm

    def __call__(self, x: Tensor, residual: Tensor, buffers: EncoderBuffers, out: Tensor | None) -> Tensor:
        """[T, H] from x [T, in] and residual [T, H], which may be overwritten where `out` is given.

        out: [T, H], the result, neither x nor buffers.dense; None on a CPU. buffers.dense: for the product.
        """
        norm, dense, partials = self.norm, buffers.dense, buffers.partials
        if out is None:
            total = self._linear.add(x, residual)
            return layer_norm(total, norm.weight.shape, norm.weight, norm.bias, norm.eps)
        if self._projection is None or dense is None or partials is None:
            product: Tensor | None = self._linear(x, dense)
        else:
            product = self._projection.add(x, residual, dense, partials)
        add_layer_norm(product, residual, self._kernel_bias, norm, out)
        return out


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer. qkv: H -> 3H, three projections as one. widen: H -> I, with GELU. num_heads * head_dim = H.

    Called in two steps, `attend` and `mix`. In the last layer of a model that pools single rows `pick` comes
    in the place of `attend`, and `mix` takes those rows alone. absorbed: qkv's parts, which that layer has.
    """

    qkv: BiasedProjection
    attention_output: DenseAddNorm
    widen: BiasedProjection
    output: DenseAddNorm
    num_heads: int
    head_dim: int
    absorbed: AbsorbedHeads | None = None

    def attend(self, hidden: Tensor, batch: DeviceBatch, buffers: EncoderBuffers) -> Tensor:
        """Softmax attention within each sequence: [T, H] -> [T, H]."""
        qkv = self.qkv(hidden, buffers.qkv, buffers.partials)
        return attend(qkv, (self.num_heads, self.head_dim), batch, buffers)

    def pick(
        self, hidden: Tensor, batch: DeviceBatch, buffers: EncoderBuffers, query: OneQuery
    ) -> tuple[Tensor, Tensor, EncoderBuffers]:
        """What `mix` takes of the row of `query` of each sequence: context and hidden [R, H], and buffers.

        hidden: [T, H]. S <= R <= T; rows past S hold anything.
        """
        wide = None if buffers.wide is None else buffers.wide.view(-1)  # idle until `mix`
        if self.absorbed is not None and absorbs(hidden, batch.num_seqs, self.absorbed, wide):
            context, few, picked = _rows_of_sequences(hidden, batch, buffers)
            scratch = context.new_empty(0) if wide is None else wide
            out = PickedRows(context[: batch.num_seqs], few[: batch.num_seqs], scratch)
            absorbed_attention(hidden, batch.cu_seqlens, self.absorbed, query, out)
            return context, few, picked
        qkv = self.qkv(hidden, buffers.qkv, buffers.partials)
        return pick((qkv, hidden), (self.num_heads, self.head_dim), batch, buffers, query)

    def mix(self, context: Tensor, hidden: Tensor, buffers: EncoderBuffers) -> Tensor:
        """The rest of the layer: [R, H] of context and input [R, H]; on a GPU in buffers.hidden (R rows)."""
        attended = self.attention_output(context, hidden, buffers, buffers.attended)
        wide = self.widen(attended, buffers.wide, buffers.partials)
        return self.output(wide, attended, buffers, buffers.hidden)


def attend(qkv: Tensor, heads: tuple[int, int], batch: DeviceBatch, buffers: EncoderBuffers) -> Tensor:
    """[T, H] of qkv [T, 3H]. heads: how many, and their width; together H."""
    context = buffers.context
    if context is None:
        context = qkv.new_zeros(len(qkv), qkv.shape[1] // 3)  # denormals in padded rows would be slow
    q, k, v = qkv.view(-1, 3, *heads).unbind(1)
    batch.attention.forward(q, k, v, context.view(-1, *heads), batch.cu_seqlens, batch.max_seqlen)
    return context


def pick(
    rows: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    batch: DeviceBatch,
    buffers: EncoderBuffers,
    query: OneQuery,
) -> tuple[Tensor, Tensor, EncoderBuffers]:
    """See EncoderLayer.pick. rows: qkv [T, 3H] and hidden [T, H]. heads: as of `attend`."""
    (qkv, hidden), num_seqs = rows, batch.num_seqs
    context, few, picked = _rows_of_sequences(hidden, batch, buffers)
    scratch = picked.scratch
    if scratch is None:
        scratch = one_query_scratch(heads[1], hidden.device)
    q, k, v = qkv.view(-1, 3, *heads).unbind(1)
    out = PickedRows(context[:num_seqs], few[:num_seqs], scratch)
    one_query_attention((q, k, v), hidden, batch.cu_seqlens, query, out)
    return context, few, picked


def _rows_of_sequences(
    hidden: Tensor, batch: DeviceBatch, buffers: EncoderBuffers
) -> tuple[Tensor, Tensor, EncoderBuffers]:
    """Room for R rows of context and of hidden, [R, H], and the buffers of as many. See EncoderLayer.pick."""
    num_rows = min(sequence_bucket(batch.num_seqs), batch.num_tokens)
    picked = buffers.picked(num_rows)
    context, few = picked.context, picked.hidden
    if context is None or few is None:
        context, few = hidden.new_zeros(2, num_rows, hidden.shape[1])
    return context, few, picked


def weight_keys(config: ModelConfig) -> tuple[WeightKey, ...]:
    """Of a layer's four products: QKV, attention output, widening, output."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        (3 * hidden, hidden, "bias"),
        (hidden, hidden, "sum"),
        (inner, hidden, "gelu"),
        (hidden, inner, "sum"),
    )


@dataclass(frozen=True, slots=True)
class ProductNames:
    """A layer's products and norms by Hugging Face's names. qkv: three of them."""

    qkv: tuple[str, ...]
    attention_output: str
    attention_norm: str
    widen: str
    output: str
    output_norm: str

    @classmethod
    def of(cls, index: int) -> ProductNames:
        """Those of layer `index`."""
        name = f"encoder.layer.{index}"
        return cls(
            tuple(f"{name}.attention.self.{part}" for part in ("query", "key", "value")),
            f"{name}.attention.output.dense",
            f"{name}.attention.output",
            f"{name}.intermediate.dense",
            f"{name}.output.dense",
            f"{name}.output",
        )


class EncoderReader:
    """Reads tables and layers by Hugging Face's tensor names."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._read = TensorReader(weights, dtype, device)

    def _dense(self, name: str, height: int, width: int) -> tuple[Tensor, Tensor]:
        return self._read(f"{name}.weight", height, width), self.bias(name, height)

    def bias(self, name: str, height: int) -> Tensor:
        """[height], of the linear layer `name`."""
        return self._read(f"{name}.bias", height)

    def norm(self, name: str) -> LayerNorm:
        """The LayerNorm after `name`."""
        return self._read.layer_norm(f"{name}.LayerNorm", self._config.hidden_size, self._config.norm_eps)

    def tables(self) -> BertTables:
        """The three embedding tables and the LayerNorm over their sum."""
        config = self._config
        word, position, token_type = (
            self._read(f"embeddings.{name}_embeddings.weight", rows, config.hidden_size)
            for name, rows in (
                ("word", config.vocab_size),
                ("position", config.max_positions),
                ("token_type", config.type_vocab_size),
            )
        )
        return BertTables(word, position, token_type, self.norm("embeddings"), config.position_offset)

    def absorbed(self, layer: EncoderLayer, index: int) -> AbsorbedHeads:
        """The query, key and value projections of layer `index` apart; read again where they are not kept."""
        size, weight = self._config.hidden_size, layer.qkv.weight
        if weight is None:
            parts = [self._read(f"{name}.weight", size, size) for name in ProductNames.of(index).qkv]
        else:
            parts = list(torch.tensor_split(weight, 3))
        query_bias, _, value_bias = torch.tensor_split(layer.qkv.bias, 3)
        query, key, value = parts
        return AbsorbedHeads(query, key, value, query_bias, value_bias, layer.num_heads)

    def layer(self, index: int) -> EncoderLayer:
        """Layer `index`, its query, key and value projections as one."""
        size, inner, names = self._config.hidden_size, self._config.intermediate_size, ProductNames.of(index)
        qkv = [self._dense(name, size, size) for name in names.qkv]
        attention_output = self._dense(names.attention_output, size, size)
        output = self._dense(names.output, size, inner)
        return EncoderLayer(
            qkv=BiasedProjection(
                torch.cat([weight for weight, _ in qkv]), torch.cat([bias for _, bias in qkv])
            ),
            attention_output=DenseAddNorm(*attention_output, self.norm(names.attention_norm)),
            widen=BiasedProjection(*self._dense(names.widen, inner, size), gelu=True),
            output=DenseAddNorm(*output, self.norm(names.output_norm)),
            num_heads=self._config.num_heads,
            head_dim=self._config.head_dim,
        )
