"""From one layer's attention to the next layer's in four products, for layers with LayerNorm (post-norm).

LayerNorm(s) Wᵀ + b is computed of s as it is. Of row m and output n it comes to
    scale[m] * (s W'ᵀ)[m, n] + offset[m] * columns[n] + bias[n],
with scale = 1 / sqrt(variance + eps) and offset = -mean * scale; W' is W with its columns times the norm's
weight, columns are the sums of its rows, bias is b and what the norm's own bias comes to. The product that
makes s also sums its rows and their squares. The hidden states are therefore read and written by the products
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from rose.kernels.fused import FusedGemm, FusedLookup, NormColumns, fused_row_counts
from rose.kernels.norm import LayerNorm, layer_norm
from rose.kernels.row_norm import UnnormedRows, row_norm

if TYPE_CHECKING:
    from torch import Tensor

    from rose.layers.encoder import EncoderBuffers, EncoderLayer

# No tile has fewer columns: bounds the partial sums a row.
_MIN_TILE = 16


@dataclass(frozen=True, slots=True)
class Dense:
    """x weightᵀ + bias: [N, K] and [N]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's products and norms, as they are in its EncoderLayer."""

    qkv: Dense
    output: Dense
    attention_norm: LayerNorm
    widen: Dense
    down: Dense
    output_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class _Normed:
    """A product and what it needs to know of the LayerNorm of its input, or of its residual."""

    weight: Tensor
    columns: NormColumns


@dataclass(frozen=True, slots=True)
class _Step:
    """A layer from its attention on, and the next one's QKV; the epsilons of the two norms between."""

    output: _Normed
    widen: _Normed
    down: _Normed
    qkv: _Normed
    eps: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Kernels:
    output: FusedGemm
    widen: FusedGemm
    down: FusedGemm
    qkv: FusedGemm


class FusedEncoder:
    """The layers of an encoder by fused kernels. Holds QKV's and the widening weights again, times norms'.

    lookup: `rose.kernels.fused.fused_gemm`, or a stand-in.
    """

    def __init__(self, layers: Sequence[LayerWeights], max_tokens: int, lookup: FusedLookup) -> None:
        self._first, self._lookup = layers[0], lookup
        self._chosen: dict[int, _Kernels | None] = {}
        weight = layers[0].output.weight
        hidden, device = len(weight), weight.device
        # What enters the first layer is normed already.
        normed = LayerNorm(weight.new_ones(hidden), weight.new_zeros(hidden), 0.0)
        # Of what enters each layer.
        self._norms = [normed, *(layer.output_norm for layer in layers)]
        self._steps = [_step(norm, *pair) for norm, pair in zip(self._norms, pairwise(layers), strict=False)]
        self._ones = torch.ones(max_tokens, device=device)
        self._zeros, self._scale, self._offset = (torch.zeros(max_tokens, device=device) for _ in range(3))
        self._sums = torch.zeros(2 * max_tokens * (hidden // _MIN_TILE), device=device)

    @classmethod
    def of(cls, layers: Sequence[EncoderLayer], max_tokens: int, lookup: FusedLookup) -> FusedEncoder | None:
        """For these layers; None where their kernels are not there or would never be used."""
        known = [weights for layer in layers if (weights := _weights(layer)) is not None]
        counts = {max_tokens, *(count for count in fused_row_counts() if count < max_tokens)}
        if len(known) < len(layers) or all(_choose(known[0], count, lookup) is None for count in counts):
            return None
        return cls(known, max_tokens, lookup)

    def using(self, lookup: FusedLookup) -> FusedEncoder:
        """The same weights and buffers, by other kernels."""
        other = copy(self)
        other._lookup, other._chosen = lookup, {}
        return other

    def takes(self, num_tokens: int) -> bool:
        """Whether layers of so many tokens are faster this way."""
        return self._kernels(num_tokens) is not None

    def step(self, index: int, rows: EncoderBuffers) -> Tensor:
        """From rows.context of layer `index` to q, k and v of the next: [T, 3H], rows.qkv.

        rows.hidden: the first layer's input; what `step` left there for the others, which is not normed, and
        by `finish` becomes that layer's input. rows.attended and rows.wide are overwritten.

        Raises:
            ValueError: so many rows are not taken, or there are no rows to take (on a CPU).
        """
        hidden, context, attended, wide = rows.hidden, rows.context, rows.attended, rows.wide
        qkv = rows.qkv
        if hidden is None or context is None or attended is None or wide is None or qkv is None:
            raise ValueError("fused layers need buffers")
        kernels = self._kernels(len(hidden))
        if kernels is None:
            raise ValueError(f"no fused kernels for {len(hidden)} tokens")
        step, eps = self._steps[index], self._steps[index].eps
        before = self._unnormed(hidden, normed=index == 0)
        after = self._add(kernels.output, (context, before), step.output, eps[0], attended)
        kernels.widen.norm(after, step.widen.weight, step.widen.columns, wide)
        before = self._add(kernels.down, (wide, after), step.down, eps[1], hidden)
        kernels.qkv.norm(before, step.qkv.weight, step.qkv.columns, qkv)
        return qkv

    def finish(self, index: int, hidden: Tensor) -> None:
        """Make hidden [R, H] layer `index`'s input: any rows of what the step before left in rows.hidden."""
        if index > 0:
            layer_norm(hidden, self._norms[index], hidden)

    def _add(
        self, kernel: FusedGemm, x: tuple[Tensor, UnnormedRows], product: _Normed, eps: float, out: Tensor
    ) -> UnnormedRows:
        """out [T, H] = x Wᵀ + b + LayerNorm(residual), and what its own norm needs. x: that and residual."""
        sums = kernel.norm_residual(x[0], product.weight, x[1], product.columns, out, self._sums)
        rows = self._unnormed(out)
        row_norm(sums, out.shape[1], eps, rows.scale, rows.offset)
        return rows

    def _unnormed(self, values: Tensor, normed: bool = False) -> UnnormedRows:
        scale, offset = (self._ones, self._zeros) if normed else (self._scale, self._offset)
        return UnnormedRows(values, scale[: len(values)], offset[: len(values)])

    def _kernels(self, num_tokens: int) -> _Kernels | None:
        """All layers are alike, and batches come in few sizes: asked once each, not four times a layer."""
        if num_tokens not in self._chosen:
            self._chosen[num_tokens] = _choose(self._first, num_tokens, self._lookup)
        return self._chosen[num_tokens]


def _step(before: LayerNorm, layer: LayerWeights, following: LayerWeights) -> _Step:
    """before: the norm of what enters the layer."""
    return _Step(
        _with_residual(layer.output, before),
        _after_norm(layer.widen, layer.attention_norm),
        _with_residual(layer.down, layer.attention_norm),
        _after_norm(following.qkv, layer.output_norm),
        (layer.attention_norm.eps, layer.output_norm.eps),
    )


def _after_norm(dense: Dense, norm: LayerNorm) -> _Normed:
    """The product of rows that are not normed."""
    plain = dense.weight.float()
    weight = (plain * norm.weight.float()).to(dense.weight.dtype)
    # Of the rounded weight: what it makes of a row's mean is then taken away to the last bit.
    columns = weight.sum(1, dtype=torch.float32)
    return _Normed(weight, NormColumns(columns, dense.bias.float() + plain @ norm.bias.float()))


def _with_residual(dense: Dense, norm: LayerNorm) -> _Normed:
    """The product to which rows that are not normed are added."""
    return _Normed(dense.weight, NormColumns(norm.weight.float(), dense.bias.float() + norm.bias.float()))


def _weights(layer: EncoderLayer) -> LayerWeights | None:
    """The layer's own tensors; None on a device that has no fused kernels."""
    qkv, output, widen, down = layer.qkv, layer.attention_output, layer.widen, layer.output
    if qkv.weight is None or output.weight is None or widen.weight is None or down.weight is None:
        return None
    return LayerWeights(
        Dense(qkv.weight, qkv.bias), Dense(output.weight, output.bias), output.norm,
        Dense(widen.weight, widen.bias), Dense(down.weight, down.bias), down.norm,
    )  # fmt: skip


def _choose(layer: LayerWeights, num_tokens: int, lookup: FusedLookup) -> _Kernels | None:
    output = lookup("ln-residual", num_tokens, *layer.output.weight.shape)
    widen = lookup("ln-gelu", num_tokens, *layer.widen.weight.shape)
    down = lookup("ln-residual", num_tokens, *layer.down.weight.shape)
    qkv = lookup("ln-bias", num_tokens, *layer.qkv.weight.shape)
    if output is None or widen is None or down is None or qkv is None:
        return None
    return _Kernels(output, widen, down, qkv)
