"""BGE-M3's layers, by every product that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from rose.aot.products import Epilogue
from rose.attention.base import AttentionSpec
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedLookup, fused_gemm
from rose.kernels.norm import LayerNorm, layer_normalized
from rose.layers.encoder import DenseAddNorm, EncoderBuffers, EncoderLayer, attend
from rose.layers.fused_encoder import Dense, FusedEncoder, LayerWeights
from rose.layers.layer_case import (
    CHECKED,
    EARLY,
    Places,
    Way,
    backends_of,
    built,
    lookup_of,
    normal,
    products_of,
    relative,
    sequences_of,
)
from rose.layers.projection import BiasedProjection

# What each place's product ends in, by mode. plain: norms by kernels between. whole: layers by products
# alone.
EPILOGUES: Mapping[str, Mapping[str, Epilogue]] = {
    "plain": {"qkv": "bias", "output": "plain", "widen": "gelu", "down": "plain"},
    "whole": {"qkv": "ln-bias", "output": "ln-residual", "widen": "ln-gelu", "down": "ln-residual"},
}
# Of four times as many tokens and more, sequences have so many; of fewer there is one.
LENGTH = 512


class EncoderCase:
    """16 heads of 64. See Case."""

    num_layers, epilogues = 24, EPILOGUES
    hidden, inner, heads, head_dim = 1024, 4096, 16, 64

    def __init__(self, m: int, device: torch.device) -> None:
        self.m, self.device = m, device
        hidden, inner = self.hidden, self.inner
        self.shapes: Mapping[str, tuple[int, int]] = {
            "qkv": (3 * hidden, hidden), "output": (hidden, hidden), "widen": (inner, hidden),
            "down": (hidden, inner),
        }  # fmt: skip
        spec = AttentionSpec(
            self.heads, self.heads, self.head_dim, self.head_dim**-0.5, False, torch.bfloat16, device
        )
        self.attention = backends_of(spec, ("fa4", "flat"))
        torch.manual_seed(m)
        self.lengths = [m] if m < 4 * LENGTH else [min(LENGTH, m - at) for at in range(0, m, LENGTH)]
        self.weights = [self._layer() for _ in range(self.num_layers)]
        self._fused = FusedEncoder(self.weights, m, lookup_of({}))
        self._start = normal(device, m, hidden)
        self.buffers = self._buffers()
        widen = fused_gemm("gelu", m, inner, hidden)
        self.base: Way = {
            "mode": "plain", "attention": "fa4", "early": "NO", "qkv": None, "output": None,
            "widen": widen.kernel.name if widen else None, "down": None,
        }  # fmt: skip
        self.modes: Mapping[str, Places] = {mode: self._places(mode) for mode in EPILOGUES}
        self._expected = self._reference()

    def _places(self, mode: str) -> Places:
        found = {place: built(epilogue) for place, epilogue in EPILOGUES[mode].items()}
        if mode == "plain":
            found = {place: [None, *names] for place, names in found.items()}
        return {"attention": [*self.attention], "early": EARLY, **found}

    def _layer(self) -> LayerWeights:
        def norm() -> LayerNorm:
            weight = normal(self.device, self.hidden, std=0.2, mean=1.0)
            return LayerNorm(weight, normal(self.device, self.hidden, std=0.1), 1e-5)

        def dense(place: str) -> Dense:
            n, k = self.shapes[place]
            return Dense(normal(self.device, n, k, std=0.03), normal(self.device, n, std=0.1))

        return LayerWeights(dense("qkv"), dense("output"), norm(), dense("widen"), dense("down"), norm())

    def _buffers(self) -> EncoderBuffers:
        def rows(width: int) -> Tensor:
            return normal(self.device, self.m, width)

        hidden = self.hidden
        return EncoderBuffers(
            hidden=rows(hidden), attended=rows(hidden), context=rows(hidden), dense=rows(hidden),
            qkv=rows(3 * hidden), wide=rows(self.inner),
            partials=normal(self.device, 8 * min(self.m, 1024) * self.inner),
        )  # fmt: skip

    def enqueue(self, way: Way, num_layers: int) -> Callable[[], object]:
        """As Case.enqueue: the loop of rose.models.bert."""
        lookup = lookup_of(products_of(self, self.base) | products_of(self, way))
        layers = [_layer_of(one, (self.heads, self.head_dim), lookup) for one in self.weights[:num_layers]]
        fused = self._fused.using(lookup) if way["mode"] == "whole" else None
        batch = sequences_of(self.lengths, self.attention[way["attention"] or ""], self.device)
        early, buffers = Early[way["early"] or "NO"], self.buffers

        def run() -> None:
            hidden = buffers.hidden
            if hidden is None:
                return
            with launching(early):
                context = layers[0].attend(hidden, batch, buffers)
                for index, (layer, following) in enumerate(pairwise(layers)):
                    if fused is not None:
                        qkv = fused.step(index, buffers)
                        context = attend(qkv, (self.heads, self.head_dim), batch, buffers)
                    else:
                        hidden = layer.mix(context, hidden, buffers)
                        context = following.attend(hidden, batch, buffers)
                if fused is not None:
                    fused.finish(len(layers) - 1, hidden)
                layers[-1].mix(context, hidden, buffers)

        return run

    def error(self, way: Way) -> float:
        """As Case.error, of the hidden state."""
        hidden = self.buffers.hidden
        if hidden is None:
            return 0.0
        hidden.copy_(self._start)
        self.enqueue(way, CHECKED)()
        return relative(hidden, self._expected)

    def _reference(self) -> Tensor:
        hidden = self._start.float()
        for layer in self.weights[:CHECKED]:
            parts = torch.split(_product(hidden, layer.qkv), self.lengths)
            mixed = torch.cat([self._mixed(part) for part in parts])
            hidden = layer_normalized(hidden + _product(mixed, layer.output), layer.attention_norm)
            wide = gelu(_product(hidden, layer.widen))
            hidden = layer_normalized(hidden + _product(wide, layer.down), layer.output_norm)
        return hidden

    def _mixed(self, qkv: Tensor) -> Tensor:
        """Attention of one sequence, in fp32."""
        q, k, v = qkv.view(1, -1, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def _product(x: Tensor, dense: Dense) -> Tensor:
    return x @ dense.weight.float().T + dense.bias.float()


def _layer_of(weights: LayerWeights, heads: tuple[int, int], lookup: FusedLookup) -> EncoderLayer:
    def both(dense: Dense) -> tuple[Tensor, Tensor]:
        return dense.weight, dense.bias

    return EncoderLayer(
        BiasedProjection(*both(weights.qkv), lookup=lookup),
        DenseAddNorm(*both(weights.output), weights.attention_norm, lookup),
        BiasedProjection(*both(weights.widen), gelu=True, lookup=lookup),
        DenseAddNorm(*both(weights.down), weights.output_norm, lookup), *heads,
    )  # fmt: skip
