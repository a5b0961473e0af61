"""From one layer's attention to the next layer's in four products, or heads normed and rotated in one.

RMSNorm(x) W is computed as rows of (x * weight) W, each divided by its root mean square afterwards: the
product that makes x also sums its squares, and the one that takes it scales its rows, by a factor of its own
making or by that of a tiny kernel between. The residual stream is therefore read and written by the products
alone, and so are SwiGLU's and the rotary kernel's operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.aot.products import HEAD_DIM, HEAD_EPS, ROW_EPS
from rose.kernels.cuda.rotary_product import ANGLE_ORDER
from rose.kernels.fused import ADJACENT, FusedGemm, FusedLookup, RopeColumns, fused_row_counts
from rose.kernels.norm import add_rms_norm
from rose.kernels.row_scale import row_scale

if TYPE_CHECKING:
    from torch import Tensor

    from rose.aot.products import Epilogue
    from rose.kernels.norm import RmsNorm
    from rose.kernels.rope import QkRope
    from rose.layers.decoder import DecoderLayer
    from rose.layers.workspace import DecoderBuffers

# No tile has fewer columns: bounds the partial sums a row.
_MIN_TILE = 16


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's [N, K] weights and norms, as they are in its DecoderLayer."""

    input_norm: RmsNorm
    qkv: Tensor
    rope: QkRope
    output: Tensor
    mlp_norm: RmsNorm
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class _Kernels:
    """A whole layer's. sums: gate_up and qkv take sums of squares rather than a factor a row."""

    output: FusedGemm
    gate_up: FusedGemm
    down: FusedGemm
    qkv: FusedGemm
    sums: bool


class FusedDecoder:
    """The layers of a decoder by fused kernels. Holds a copy of the QKV weights, in another order.

    Queries and keys leave it with the two columns of a rotated pair side by side. Attention does not notice:
    a dot product is the same in any order of its terms.
    lookup: `rose.kernels.fused.fused_gemm`, or a stand-in.
    """

    def __init__(self, layers: Sequence[LayerWeights], max_tokens: int, lookup: FusedLookup) -> None:
        first = layers[0]
        device, hidden = first.qkv.device, len(first.output)
        self._layers = layers
        self._lookup = lookup
        self._chosen: dict[int, _Kernels | FusedGemm | None] = {}
        self._first: dict[int, FusedGemm | None] = {}
        self._qkv = [with_pairs_adjacent(layer.qkv, layer.rope) for layer in layers]
        self._columns = [rope_columns(layer.rope, layer.qkv.dtype) for layer in layers]
        self._tables = {order: angle_table(first.rope, order) for order in (ADJACENT, ANGLE_ORDER)}
        self._angles = torch.zeros(max_tokens, HEAD_DIM, dtype=torch.float16, device=device)
        self._scale = torch.zeros(max_tokens, device=device)
        self._sums = torch.zeros(max_tokens * (hidden // _MIN_TILE), device=device)

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], max_tokens: int, lookup: FusedLookup) -> FusedDecoder | None:
        """For these layers; None where their kernels are not there or would never be used."""
        weights = [_weights(layer) for layer in layers]
        known = [one for one in weights if one is not None and _fits(one)]
        counts = {max_tokens, *(count for count in fused_row_counts() if count < max_tokens)}
        if len(known) < len(layers) or all(_choose(known[0], count, lookup) is None for count in counts):
            return None
        return cls(known, max_tokens, lookup)

    def using(self, lookup: FusedLookup) -> FusedDecoder:
        """The same weights and buffers, by other kernels."""
        other = copy(self)
        other._lookup, other._chosen, other._first = lookup, {}, {}
        return other

    def takes(self, num_tokens: int) -> bool:
        """Whether whole layers of so many tokens are faster this way: `step`."""
        return isinstance(self._kernels(num_tokens), _Kernels)

    def takes_heads(self, num_tokens: int) -> bool:
        """Whether only QKV, with its heads normed and rotated, is: `follow`."""
        return isinstance(self._kernels(num_tokens), FusedGemm)

    def prepare(self, rows: DecoderBuffers) -> None:
        """Once a forward, by `begin` or before the first `step` or `follow`: the angles of rows.positions."""
        num_tokens = len(rows.positions)
        table = self._tables[self._order(num_tokens)]
        torch.index_select(table, 0, rows.positions, out=self._angles[:num_tokens])

    def _order(self, num_tokens: int) -> tuple[int, ...]:
        """Of a token's angles, as the kernel takes them that makes QKV of so many tokens."""
        kernels = self._kernels(num_tokens)
        kernel = kernels.qkv if isinstance(kernels, _Kernels) else kernels
        return ADJACENT if kernel is None else kernel.angle_order

    def begin(self, rows: DecoderBuffers) -> bool:
        """`prepare`, and rows.qkv of the first layer, normed and rotated, of rows.hidden.

        False: the first layer's product has to be made in another way.
        """
        self.prepare(rows)
        num_tokens = len(rows.hidden)
        if num_tokens not in self._first:
            shape = self._layers[0].qkv.shape
            self._first[num_tokens] = self._lookup("unscaled-rope", num_tokens, *shape)
        kernel = self._first[num_tokens]
        if kernel is None or kernel.angle_order != self._order(num_tokens):
            return False
        self._heads(kernel, 0, None, rows)
        return True

    def step(self, index: int, rows: DecoderBuffers) -> None:
        """From rows.context of layer `index` to rows.qkv of the next, normed and rotated.

        rows.residual is brought up to date, rows.hidden and rows.narrow are overwritten.

        Raises:
            ValueError: so many rows are not taken.
        """
        num_tokens = len(rows.hidden)
        layer, following = self._layers[index], self._layers[index + 1]
        kernels = self._kernels(num_tokens)
        if not isinstance(kernels, _Kernels):
            raise ValueError(f"no fused kernels for {num_tokens} tokens")

        def add(kernel: FusedGemm, x: Tensor, weight: Tensor, norm: RmsNorm) -> Tensor:
            """rows.residual += x weightᵀ; rows.hidden and its rows' scale are what `norm` makes of it."""
            sums = kernel.residual(x, weight, rows.residual, norm.weight, rows.hidden, self._sums)
            if kernels.sums:
                return sums
            scale = self._scale[:num_tokens]
            row_scale(sums, len(weight), norm.eps, scale)
            return scale

        scale = add(kernels.output, rows.context, layer.output, layer.mlp_norm)
        kernels.gate_up.scaled_swiglu(rows.hidden, layer.gate_up, scale, rows.narrow)
        scale = add(kernels.down, rows.narrow, layer.down, following.input_norm)
        self._heads(kernels.qkv, index + 1, scale, rows)

    def follow(self, index: int, mixed: Tensor | None, rows: DecoderBuffers) -> None:
        """From what `mix` of layer `index` returned to rows.qkv of the next, normed and rotated.

        rows.residual is brought up to date, rows.hidden is overwritten.

        Raises:
            ValueError: so many rows are not taken.
        """
        kernel = self._kernels(len(rows.hidden))
        if not isinstance(kernel, FusedGemm):
            raise ValueError(f"no fused kernel for the heads of {len(rows.hidden)} tokens")
        add_rms_norm(mixed, rows.residual, self._layers[index + 1].input_norm, rows.hidden)
        self._heads(kernel, index + 1, None, rows)

    def _heads(self, kernel: FusedGemm, index: int, scale: Tensor | None, rows: DecoderBuffers) -> None:
        weight, columns = self._qkv[index], self._columns[index]
        kernel.rope(rows.hidden, weight, columns, scale, self._angles[: len(rows.hidden)], rows.qkv)

    def _kernels(self, num_tokens: int) -> _Kernels | FusedGemm | None:
        """All layers are alike, and batches come in few sizes: asked once each, not four times a layer."""
        if num_tokens not in self._chosen:
            self._chosen[num_tokens] = _choose(self._layers[0], num_tokens, self._lookup)
        return self._chosen[num_tokens]


def with_pairs_adjacent(weight: Tensor, rope: QkRope) -> Tensor:
    """A copy of the QKV weight [N, K]: rows j and D / 2 + j of query and key heads become 2j and 2j + 1."""
    rotated = rope.rotated_heads * rope.head_dim
    pairs = weight[:rotated].view(rope.rotated_heads, 2, rope.head_dim // 2, -1).transpose(1, 2)
    return torch.cat([pairs.reshape(rotated, -1), weight[rotated:]])


def rope_columns(rope: QkRope, dtype: torch.dtype) -> RopeColumns:
    """The norms' weights and what is left alone, of each column of `with_pairs_adjacent`'s product.

    Raises:
        ValueError: the heads have no norm.
    """
    if rope.weight is None:
        raise ValueError("heads without a norm have no fused kernel")
    adjacent = rope.weight.view(2, 2, -1).transpose(1, 2).reshape(2, -1).to(dtype)
    values = torch.zeros(rope.num_kv_heads * rope.head_dim, dtype=dtype, device=adjacent.device)
    heads = [adjacent[0].repeat(rope.num_heads), adjacent[1].repeat(rope.num_kv_heads)]
    rotated = torch.zeros(rope.rotated_heads * rope.head_dim, dtype=dtype, device=adjacent.device)
    keep = torch.cat([rotated, values + 1])
    return RopeColumns(torch.cat([*heads, values]), keep, rope.rotated_heads)


def angle_table(rope: QkRope, order: Sequence[int]) -> Tensor:
    """fp16[P, D]: cos and sin of each pair in turns; off by 2⁻¹² at most, an eighth of what bf16 is.

    Twice that where YaRN's attention factor takes them past 1. order: of pairs, see FusedGemm.angle_order.
    """
    cos, sin = rope.cos_sin[:, list(order)], rope.cos_sin[:, [HEAD_DIM // 2 + pair for pair in order]]
    return torch.stack([cos, sin], dim=2).flatten(1).half()


def _weights(layer: DecoderLayer) -> LayerWeights | None:
    """The layer's own tensors; None on a device that has no fused kernels."""
    qkv, output = layer.qkv.weight, layer.output.weight
    gate_up, down = layer.gate_up.weight, layer.down.weight
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return LayerWeights(layer.input_norm, qkv, layer.rope, output, layer.mlp_norm, gate_up, down)


def _fits(layer: LayerWeights) -> bool:
    """Whether the heads are those that the rope epilogue was compiled for."""
    rope = layer.rope
    if rope.weight is None or rope.bias is not None:  # Llama's and Qwen2's
        return False
    return (rope.head_dim, rope.eps) == (HEAD_DIM, HEAD_EPS)


def _choose(layer: LayerWeights, num_tokens: int, lookup: FusedLookup) -> _Kernels | FusedGemm | None:
    """For so many rows a whole layer's kernels, else one for heads alone, else none."""
    output = lookup("residual", num_tokens, *layer.output.shape)
    down = lookup("residual", num_tokens, *layer.down.shape)
    ways: list[tuple[Epilogue, Epilogue]] = [("scaled-swiglu", "rope")]
    if {layer.input_norm.eps, layer.mlp_norm.eps} == {ROW_EPS}:
        ways.insert(0, ("rms-swiglu", "rms-rope"))
    for swiglu, rope in ways:
        gate_up = lookup(swiglu, num_tokens, *layer.gate_up.shape)
        qkv = lookup(rope, num_tokens, *layer.qkv.shape)
        if output is not None and down is not None and gate_up is not None and qkv is not None:
            return _Kernels(output, gate_up, down, qkv, sums=rope == "rms-rope")
    return lookup("unscaled-rope", num_tokens, *layer.qkv.shape)
