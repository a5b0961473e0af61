"""BGE-M3's layers, by every product that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from rose.aot.products import Epilogue
from rose.attention.base import AttentionSpec
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedLookup, fused_gemm
from rose.kernels.norm import LayerNorm, layer_normalized
from rose.layers.encoder import DenseAddNorm, EncoderBuffers, EncoderLayer
from rose.layers.layer_case import (
    CHECKED,
    EARLY,
    Places,
    Sequences,
    Way,
    backends_of,
    built,
    device_batch,
    lookup_of,
    normal,
    products_of,
    relative,
)
from rose.layers.projection import BiasedProjection

EPILOGUES: Mapping[str, Mapping[str, Epilogue]] = {
    "plain": {"qkv": "bias", "output": "plain", "widen": "gelu", "down": "plain"}
}


@dataclass(frozen=True, slots=True)
class _Weights:
    """[N, K] and [N] by place; the norms after output and down."""

    weight: Mapping[str, Tensor]
    bias: Mapping[str, Tensor]
    norms: tuple[LayerNorm, LayerNorm]


class EncoderCase:
    """16 heads of 64. See Case."""

    num_layers, epilogues = 24, EPILOGUES
    hidden, inner, heads, head_dim = 1024, 4096, 16, 64

    def __init__(self, sequences: Sequences, device: torch.device) -> None:
        self.sequences, self.m, self.device = sequences, sequences.rows, device
        m, hidden, inner = self.m, self.hidden, self.inner
        self.shapes: Mapping[str, tuple[int, int]] = {
            "qkv": (3 * hidden, hidden), "output": (hidden, hidden), "widen": (inner, hidden),
            "down": (hidden, inner),
        }  # fmt: skip
        spec = AttentionSpec(
            self.heads, self.heads, self.head_dim, self.head_dim**-0.5, False, torch.bfloat16, device
        )
        self.attention = backends_of(spec, ("fa4", "flat"))
        torch.manual_seed(m)
        self.weights = [self._layer() for _ in range(self.num_layers)]
        self._start = normal(device, m, hidden)
        self.buffers = self._buffers()
        widen = fused_gemm("gelu", m, inner, hidden)
        self.base: Way = {
            "mode": "plain", "attention": "fa4", "early": "NO", "qkv": None, "output": None,
            "widen": widen.kernel.name if widen else None, "down": None,
        }  # fmt: skip
        products: dict[str, list[str | None]] = {
            place: [None, *built(epilogue)] for place, epilogue in EPILOGUES["plain"].items()
        }
        self.modes: Mapping[str, Places] = {
            "plain": {"attention": [*self.attention], "early": EARLY, **products}
        }
        self._expected = self._reference()

    def _layer(self) -> _Weights:
        def norm() -> LayerNorm:
            weight = normal(self.device, self.hidden, std=0.2, mean=1.0)
            return LayerNorm(weight, normal(self.device, self.hidden, std=0.1), 1e-5)

        return _Weights(
            {place: normal(self.device, *shape, std=0.03) for place, shape in self.shapes.items()},
            {place: normal(self.device, shape[0], std=0.1) for place, shape in self.shapes.items()},
            (norm(), norm()),
        )

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
        """As Case.enqueue: the loop of rose.models.bert, without its tables.

        Runs start from the same rows, as in DecoderCase.
        """
        lookup = lookup_of(products_of(self, way))
        layers = [self._layer_of(one, lookup) for one in self.weights[:num_layers]]
        batch = device_batch(self.sequences, self.attention[way["attention"] or ""], self.device)
        early, buffers = Early[way["early"] or "NO"], self.buffers

        def run() -> None:
            hidden = buffers.hidden
            with launching(early):
                if hidden is not None:
                    hidden.copy_(self._start)
                for layer in layers:
                    if hidden is not None:
                        hidden = layer.mix(layer.attend(hidden, batch, buffers), hidden, buffers)

        return run

    def _layer_of(self, weights: _Weights, lookup: FusedLookup) -> EncoderLayer:
        def both(place: str) -> tuple[Tensor, Tensor]:
            return weights.weight[place], weights.bias[place]

        first, second = weights.norms
        return EncoderLayer(
            BiasedProjection(*both("qkv"), lookup=lookup), DenseAddNorm(*both("output"), first, lookup),
            BiasedProjection(*both("widen"), gelu=True, lookup=lookup),
            DenseAddNorm(*both("down"), second, lookup), self.heads, self.head_dim,
        )  # fmt: skip

    def error(self, way: Way) -> float:
        """As Case.error, of the hidden state."""
        hidden = self.buffers.hidden
        if hidden is None:
            return 0.0
        self.enqueue(way, CHECKED)()
        return relative(hidden, self._expected)

    def _reference(self) -> Tensor:
        hidden, shape = self._start.float(), (self.sequences.count, self.sequences.length)
        for layer in self.weights[:CHECKED]:
            weight = {place: part.float().T for place, part in layer.weight.items()}
            bias = {place: part.float() for place, part in layer.bias.items()}
            product = hidden @ weight["qkv"] + bias["qkv"]
            q, k, v = product.view(*shape, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(self.m, self.hidden)
            total = hidden + mixed @ weight["output"] + bias["output"]
            hidden = layer_normalized(total, layer.norms[0])
            wide = gelu(hidden @ weight["widen"] + bias["widen"])
            hidden = layer_normalized(hidden + wide @ weight["down"] + bias["down"], layer.norms[1])
        return hidden
