"""pplx-embed-0.6b's layers, put together in every way that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from rose.aot.products import HEAD_DIM, HEAD_EPS, ROW_EPS, Epilogue
from rose.attention.base import AttentionSpec
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedLookup, fused_gemm
from rose.kernels.norm import RmsNorm, add_rms_norm, rms_normalized
from rose.kernels.one_query import one_query_scratch
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.layers.decoder import DecoderLayer
from rose.layers.fused_decoder import FusedDecoder, LayerWeights
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
from rose.layers.projection import GatedProjection, Projection
from rose.layers.workspace import DecoderBuffers

# What each place's product ends in, by mode. plain: norms and rotation by kernels between. heads: rotation in
# QKV. sums, factors: whole layers by products alone, without and with a kernel that makes factors of sums.
EPILOGUES: Mapping[str, Mapping[str, Epilogue]] = {
    "plain": {"qkv": "plain", "output": "plain", "gate_up": "swiglu", "down": "plain"},
    "heads": {"qkv": "unscaled-rope", "output": "plain", "gate_up": "swiglu", "down": "plain"},
    "sums": {"qkv": "rms-rope", "output": "residual", "gate_up": "rms-swiglu", "down": "residual"},
    "factors": {"qkv": "rope", "output": "residual", "gate_up": "scaled-swiglu", "down": "residual"},
}

# With fewer, tiles of the 1024 columns of output and down that are larger than 128x128 leave most of the GPU
# idle.
MANY_ROWS = 2048


class DecoderCase:
    """16 query heads, 8 key and value heads of 128. See Case."""

    num_layers, epilogues = 28, EPILOGUES
    hidden, inner, heads, kv_heads = 1024, 3072, 16, 8

    def __init__(self, sequences: Sequences, device: torch.device) -> None:
        self.sequences, self.m, self.device = sequences, sequences.rows, device
        query, self.qkv = self.heads * HEAD_DIM, (self.heads + 2 * self.kv_heads) * HEAD_DIM
        spec = AttentionSpec(
            self.heads, self.kv_heads, HEAD_DIM, HEAD_DIM**-0.5, False, torch.bfloat16, device
        )
        self.attention = backends_of(spec, ("fa4", "flat", "flat-product"))
        m = self.m
        torch.manual_seed(m)
        self._table = rope_table(HEAD_DIM, 1e6, sequences.length, device)
        self.weights = [self._layer(query) for _ in range(self.num_layers + 1)]
        first = self.weights[0]
        weights = {"qkv": first.qkv, "output": first.output, "gate_up": first.gate_up, "down": first.down}
        self.shapes: Mapping[str, tuple[int, int]] = {
            place: (len(weight), weight.shape[1]) for place, weight in weights.items()
        }
        self._fused = FusedDecoder(self.weights, m, lookup_of({}))
        self._start = normal(device, m, self.hidden)
        self._normed = rms_normalized(self._start.float(), first.input_norm).to(torch.bfloat16)
        self.rows = self._buffers(query)
        swiglu = fused_gemm("swiglu", m, *first.gate_up.shape)
        self.base: Way = {
            "mode": "plain", "attention": "fa4", "early": "NO", "qkv": None, "output": None,
            "gate_up": swiglu.kernel.name if swiglu else None, "down": None,
        }  # fmt: skip
        self.modes: Mapping[str, Places] = {mode: self._places(mode) for mode in EPILOGUES}
        self._expected = self._reference()

    def _places(self, mode: str) -> Places:
        found = {place: built(epilogue) for place, epilogue in EPILOGUES[mode].items()}
        attention = [name for name in self.attention if mode == "plain" or name != "flat-product"]
        if mode in ("plain", "heads"):
            found["output"], found["down"] = [None, *found["output"]], [None, *found["down"]]
            found["gate_up"] = found["gate_up"] or [None]
        elif self.m < MANY_ROWS:
            found["output"] = found["down"] = built("residual", 128 * 128)
        if mode == "plain":
            found["qkv"] = [None, *found["qkv"]]
        return {"attention": attention, "early": EARLY, **found}

    def _layer(self, query: int) -> LayerWeights:
        def weight(*shape: int) -> Tensor:
            return normal(self.device, *shape, std=0.03)

        def norm() -> RmsNorm:
            return RmsNorm(normal(self.device, self.hidden, std=0.2, mean=1.0), ROW_EPS)

        heads = normal(self.device, 2, HEAD_DIM, std=0.2, mean=1.0)
        rope = QkRope(self.heads, self.kv_heads, HEAD_DIM, HEAD_EPS, heads, self._table)
        return LayerWeights(
            norm(), weight(self.qkv, self.hidden), rope, weight(self.hidden, query), norm(),
            weight(2 * self.inner, self.hidden), weight(self.hidden, self.inner),
        )  # fmt: skip

    def _buffers(self, query: int) -> DecoderBuffers:
        positions = torch.arange(self.m, dtype=torch.int32, device=self.device) % self.sequences.length
        widths = (self.hidden, self.qkv, query, 2 * self.inner, self.inner)
        hidden, qkv, context, wide, narrow = (normal(self.device, self.m, width) for width in widths)
        partials = normal(self.device, 8 * min(self.m, 1024) * 2 * self.inner)
        scratch = one_query_scratch(HEAD_DIM, self.device)
        return DecoderBuffers(
            self._start.clone(), hidden, positions, qkv, context, wide, narrow, partials, scratch
        )

    def enqueue(self, way: Way, num_layers: int) -> Callable[[], object]:
        """As Case.enqueue: the loop of rose.models.qwen3, without its table of the first layer's QKV.

        Each run starts from the same rows: what layer after layer is added to becomes alike in all rows, and
        such numbers take less power than those of texts, so that ways that are slower for these look faster.
        """
        mode = way["mode"] or "plain"
        lookup = lookup_of(products_of(self, way))
        layers = [_layer_of(one, lookup) for one in self.weights[: num_layers + 1]]
        fused = None if mode == "plain" else self._fused.using(lookup)
        batch = device_batch(self.sequences, self.attention[way["attention"] or ""], self.device)
        rows, early = self.rows, Early[way["early"] or "NO"]

        def run() -> None:
            with launching(early):
                rows.residual.copy_(self._start)
                rows.hidden.copy_(self._normed)
                product: Tensor | None = None
                if fused is None or not fused.begin(rows):
                    product = layers[0].project(rows)
                for index, (layer, following) in enumerate(pairwise(layers)):
                    layer.attend(batch, rows, product)
                    product = None
                    if fused is None:
                        add_rms_norm(layer.mix(rows), rows.residual, following.input_norm, rows.hidden)
                        product = following.project(rows)
                    elif mode == "heads":
                        fused.follow(index, layer.mix(rows), rows)
                    else:
                        fused.step(index, rows)

        return run

    def error(self, way: Way) -> float:
        """As Case.error, of what the layers add to the residual stream."""
        self.enqueue(way, CHECKED)()
        start = self._start.float()
        return relative(self.rows.residual.float() - start, self._expected - start)

    def _reference(self) -> Tensor:
        stream, shape = self._start.float(), (self.sequences.count, self.sequences.length)
        for layer in self.weights[:CHECKED]:
            product = rms_normalized(stream, layer.input_norm) @ layer.qkv.float().T
            qk_norm_rope(product, self.rows.positions, layer.rope, product)
            groups = [self.heads, self.kv_heads, self.kv_heads]
            q, k, v = torch.split(product.view(*shape, -1, HEAD_DIM).transpose(1, 2), groups, dim=1)
            mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
            stream = stream + mixed.reshape(self.m, -1) @ layer.output.float().T
            wide = rms_normalized(stream, layer.mlp_norm) @ layer.gate_up.float().T
            gate, up = wide.chunk(2, dim=1)
            stream = stream + (silu(gate) * up) @ layer.down.float().T
        return stream


def _layer_of(weights: LayerWeights, lookup: FusedLookup) -> DecoderLayer:
    return DecoderLayer(
        weights.input_norm, Projection(weights.qkv, lookup=lookup), weights.rope,
        Projection(weights.output, lookup=lookup), weights.mlp_norm, GatedProjection(weights.gate_up, lookup),
        Projection(weights.down, lookup=lookup),
    )  # fmt: skip
