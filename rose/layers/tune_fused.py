"""Time products with fused epilogues against what serves without, and write what `rose.kernels.fused` reads.

    python -m rose.layers.tune_fused [--out FILE.json]

Every way is timed over the weights of 28 layers in one CUDA graph, as in a model: one weight would stay in
the L2 cache and look faster than it is. The decoder's four kernels are chosen together, since each leaves the
next what only that one takes. Stops at --budget-s and writes what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor

from rose.aot.products import DEFAULT_PRODUCTS, HEAD_DIM, HEAD_EPS, Epilogue
from rose.kernels.fused import TABLE_PATH, FusedGemm, FusedLookup, load
from rose.kernels.norm import RmsNorm, add_rms_norm
from rose.kernels.rope import QkRope, rope_table
from rose.kernels.tables import say, tuner_parser, write_choices
from rose.kernels.timing import graph_us
from rose.layers.decoder import DecoderLayer
from rose.layers.fused_decoder import FusedDecoder, LayerWeights
from rose.layers.projection import BiasedProjection, GatedProjection, Projection
from rose.layers.workspace import DecoderBuffers

NUM_LAYERS = 28
ROWS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 51200)
# What is there without keeps a shape unless a kernel is at least this much faster.
MIN_GAIN = 0.02

# (epilogue, n, k) and, at each number of rows, the chosen kernel and both times in µs a layer.
Line = dict[str, object]
Kernels = Mapping[Epilogue, FusedGemm]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a Qwen3 layer whose heads have 128 elements."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    inner: int


# pplx-embed and Qwen3-Embedding: 0.6B and 4B. BGE-M3's feed-forward part: [inner, hidden].
DECODERS = (DecoderShape(1024, 16, 8, 3072), DecoderShape(2560, 32, 8, 9728))
WIDENINGS = ((4096, 1024),)


def forced(kernels: Kernels) -> FusedLookup:
    """These kernels for every shape, and no others."""
    return lambda epilogue, m, n, k: kernels.get(epilogue)


def candidates(epilogue: Epilogue) -> list[FusedGemm]:
    """The kernels with that epilogue that are built."""
    loaded = [load(kernel) for kernel in DEFAULT_PRODUCTS if kernel.epilogue == epilogue]
    return [gemm for gemm in loaded if gemm is not None]


def layer_us(enqueue: Callable[[], object], num_rows: int) -> float:
    """Microseconds a layer of what enqueues NUM_LAYERS of them."""
    replays, rounds = (2, 2) if num_rows > 8192 else (5, 3)
    return graph_us(enqueue, replays, rounds) / NUM_LAYERS


def fastest(
    ways: Sequence[Kernels], enqueue: Callable[[FusedLookup], Callable[[], object]], m: int
) -> tuple[Kernels, float, float]:
    """The best of `ways` (or none of them), its time and that without, in µs a layer."""
    plain_us = layer_us(enqueue(forced({})), m)
    best: Kernels = {}
    best_us = plain_us * (1 - MIN_GAIN)
    for way in ways:
        us = layer_us(enqueue(forced(way)), m)
        if us < best_us:
            best, best_us = way, us
    return best, best_us if best else plain_us, plain_us


def tune_widening(shape: tuple[int, int], deadline: float) -> Iterator[Line]:
    """GELU of an encoder's first feed-forward product."""
    n, k = shape
    weights, bias = [_random(n, k) for _ in range(NUM_LAYERS)], _random(n)
    for m in _rows_until(deadline):
        x, out, partials = _random(m, k), _random(m, n), _random(8 * 1024 * n)

        def enqueue(lookup: FusedLookup) -> Callable[[], object]:
            layers = [BiasedProjection(weight, bias, True, lookup) for weight in weights]
            return lambda: [layer(x, out, partials) for layer in layers]  # noqa: B023

        best, us, plain_us = fastest([{"gelu": gemm} for gemm in candidates("gelu")], enqueue, m)
        yield _line("gelu", weights[0], m, best, (us, plain_us))


def tune_decoder(shape: DecoderShape, deadline: float) -> Iterator[Line]:
    """SwiGLU by itself, then the four kernels of a layer in which divisions are left to the next product."""
    layers = [_layer(shape) for _ in range(NUM_LAYERS + 1)]
    for m in _rows_until(deadline):
        rows = _buffers(layers[0], m)

        def gated(lookup: FusedLookup) -> Callable[[], object]:
            parts = [GatedProjection(layer.gate_up, lookup) for layer in layers[:NUM_LAYERS]]
            return lambda: [part(rows.hidden, rows.wide, rows.narrow, rows.partials) for part in parts]  # noqa: B023

        swiglu, us, plain_us = fastest([{"swiglu": gemm} for gemm in candidates("swiglu")], gated, m)
        yield _line("swiglu", layers[0].gate_up, m, swiglu, (us, plain_us))

        def whole(lookup: FusedLookup, m: int = m, swiglu: Kernels = swiglu) -> Callable[[], object]:
            fused = FusedDecoder(layers, m, lookup)
            if fused.takes(m):
                fused.prepare(rows)  # noqa: B023
                return partial(_steps, fused, rows)  # noqa: B023
            return partial(_plain, [_plain_layer(layer, forced(swiglu)) for layer in layers], rows)  # noqa: B023

        names: tuple[Epilogue, ...] = ("residual", "scaled-swiglu", "rope")
        ways = [dict(zip(names, way, strict=True)) for way in product(*map(candidates, names))]
        best, us, plain_us = fastest(ways, whole, m)
        first = layers[0]
        for weight in (first.output, first.down):
            yield _line("residual", weight, m, best, (us, plain_us))
        yield _line("scaled-swiglu", first.gate_up, m, best, (us, plain_us))
        yield _line("rope", first.qkv, m, best, (us, plain_us))


def _steps(fused: FusedDecoder, rows: DecoderBuffers) -> None:
    for index in range(NUM_LAYERS):
        fused.step(index, rows)


def _plain(layers: Sequence[DecoderLayer], rows: DecoderBuffers) -> None:
    for layer, following in pairwise(layers):
        add_rms_norm(layer.mix(rows), rows.residual, following.input_norm, rows.hidden)
        following.rotate(following.project(rows), rows)


def _plain_layer(weights: LayerWeights, lookup: FusedLookup) -> DecoderLayer:
    return DecoderLayer(
        weights.input_norm, Projection(weights.qkv), weights.rope, Projection(weights.output),
        weights.mlp_norm, GatedProjection(weights.gate_up, lookup), Projection(weights.down),
    )  # fmt: skip


def _layer(shape: DecoderShape) -> LayerWeights:
    query, key = shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM
    hidden, table = shape.hidden, rope_table(HEAD_DIM, 1e6, 512, "cuda")
    heads = (shape.num_heads, shape.num_kv_heads, HEAD_DIM, HEAD_EPS)
    return LayerWeights(
        RmsNorm(_random(hidden), 1e-6), _random(query + 2 * key, hidden),
        QkRope(*heads, _random(2, HEAD_DIM), table), _random(hidden, query),
        RmsNorm(_random(hidden), 1e-6), _random(2 * shape.inner, hidden), _random(hidden, shape.inner),
    )  # fmt: skip


def _buffers(layer: LayerWeights, m: int) -> DecoderBuffers:
    (hidden, query), inner, qkv = layer.output.shape, layer.down.shape[1], len(layer.qkv)
    positions = torch.arange(m, dtype=torch.int32, device="cuda") % 512
    return DecoderBuffers(
        residual=_random(m, hidden), hidden=_random(m, hidden), positions=positions, qkv=_random(m, qkv),
        context=_random(m, query), wide=_random(m, 2 * inner), narrow=_random(m, inner),
        partials=_random(8 * 1024 * 2 * inner),
    )  # fmt: skip


def _random(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.05)


def _rows_until(deadline: float) -> Iterator[int]:
    for m in ROWS:
        if time.monotonic() > deadline:
            say(f"out of time at {m} rows")
            return
        yield m


def _line(epilogue: Epilogue, weight: Tensor, m: int, best: Kernels, times: tuple[float, float]) -> Line:
    n, k = weight.shape
    name = best[epilogue].kernel.name if epilogue in best else None
    us, plain_us = (round(value, 2) for value in times)
    say(f"{epilogue:13} [{n}, {k}] M={m:5} {plain_us:8.2f} us, best {us:8.2f} us: {name or 'not fused'}")
    return {"epilogue": epilogue, "n": n, "k": k, "min_m": m, "kernel": name, "us": us, "plain_us": plain_us}


def write(path: Path, lines: Sequence[Line]) -> None:
    """The table; choices that repeat the one for fewer rows are left out."""
    kept: list[Line] = []
    last: dict[tuple[object, ...], object] = {}
    for line in lines:
        key = (line["epilogue"], line["n"], line["k"])
        if line["kernel"] != last.get(key):
            kept.append(line)
        last[key] = line["kernel"]
    write_choices(path, torch.cuda.get_device_name(), kept)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    arguments = tuner_parser("rose.layers.tune_fused", __doc__, TABLE_PATH, budget_s=80.0).parse_args(argv)
    deadline = time.monotonic() + arguments.budget_s
    lines: list[Line] = []
    with torch.inference_mode():
        for shape in WIDENINGS:
            lines += tune_widening(shape, deadline)
        for decoder in DECODERS:
            lines += tune_decoder(decoder, deadline)
            write(arguments.out, lines)
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
