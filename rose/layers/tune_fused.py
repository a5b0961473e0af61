"""Time a large decoder's products with fused epilogues against what serves without, for `rose.kernels.fused`.

    python -m rose.layers.tune_fused [--out FILE.json]

Every way is timed over the weights of 28 layers in one CUDA graph, as in a model: one weight would stay in
the L2 cache and look faster than it is. The decoder's four kernels serve together or not at all, since each
leaves the next what only that one takes; one after another is chosen. Which is fastest changes with every 128
rows, as tiles fill or overfill a wave of multiprocessors: so many numbers of rows are measured. Of fewer than
2048, and of 0.6B decoders and of encoders, the table in use stays (rose.layers.tune_layers). Stops at
--budget-s and writes what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from rose.aot.products import HEAD_DIM, HEAD_EPS, Epilogue, ProductKernel
from rose.kernels.early import Early, launching
from rose.kernels.fused import TABLE_PATH, FusedGemm, FusedKey, FusedLookup, load
from rose.kernels.norm import RmsNorm, add_rms_norm
from rose.kernels.one_query import one_query_scratch
from rose.kernels.rope import QkRope, rope_table
from rose.kernels.tables import in_use, read_choices, say, tuner_parser, write_choices
from rose.kernels.timing import graph_us
from rose.layers.decoder import DecoderLayer
from rose.layers.fused_decoder import FusedDecoder, LayerWeights
from rose.layers.layer_case import built
from rose.layers.layer_table import merged
from rose.layers.projection import GatedProjection, Projection
from rose.layers.workspace import DecoderBuffers

NUM_LAYERS = 28
# Of 2048 to 8192 tokens every number that buckets have, then some: a wave more or less matters less there.
ROWS = (*range(2048, 8193, 256), *range(9216, 12289, 1024), 12800, 13312, 14336, 15360, 16384, 25600, 51200)
# What is there without keeps a shape unless a kernel is at least this much faster.
MIN_GAIN = 0.02

# (epilogue, n, k) and, at each number of rows, the chosen kernel and both times in µs a layer.
Line = dict[str, object]
Kernels = Mapping[Epilogue, FusedGemm]
# One kernel, or several to choose from, for each product.
Chosen = Mapping[FusedKey, FusedGemm]
Places = Mapping[FusedKey, Sequence[FusedGemm]]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a Qwen3 layer whose heads have 128 elements."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    inner: int


# pplx-embed and Qwen3-Embedding: 4B; and 0.6B, for whose layers in BF16 rose.layers.tune_layers is there.
LARGE_DECODERS = (DecoderShape(2560, 32, 8, 9728),)
DECODERS = (DecoderShape(1024, 16, 8, 3072), *LARGE_DECODERS)


def forced(kernels: Kernels) -> FusedLookup:
    """These kernels for every shape, and no others."""
    return lambda epilogue, m, n, k: kernels.get(epilogue)


def chosen_alone(chosen: Chosen) -> FusedLookup:
    """These kernels for these products, and no others."""
    return lambda epilogue, m, n, k: chosen.get((epilogue, n, k))


def candidates(epilogue: Epilogue) -> list[FusedGemm]:
    """The kernels with that epilogue that are built."""
    gemms = (load(ProductKernel.parse(name)) for name in built(epilogue) if name is not None)
    return [gemm for gemm in gemms if gemm is not None]


def layer_us(enqueue: Callable[[], object], num_rows: int) -> float:
    """Microseconds a layer of what enqueues NUM_LAYERS of them."""
    replays, rounds = (2, 2) if num_rows > 8192 else (3, 2)
    return graph_us(enqueue, replays, rounds) / NUM_LAYERS


def fastest(
    places: Places, start: Chosen, us_of: Callable[[Chosen], float]
) -> tuple[Chosen, tuple[float, float]]:
    """The best kernels (or none), their time and that without; from `start` on, a place at a time."""
    plain_us = us_of({})
    if not all(places.values()):
        return {}, (plain_us, plain_us)
    best: Chosen = {key: start.get(key, kernels[0]) for key, kernels in places.items()}
    best_us = us_of(best)
    for key, kernels in places.items():
        for kernel in kernels:
            tried = {**best, key: kernel}
            us = best_us if kernel is best[key] else us_of(tried)
            if us < best_us:
                best, best_us = tried, us
    return (best, (best_us, plain_us)) if best_us < plain_us * (1 - MIN_GAIN) else ({}, (plain_us, plain_us))


def tune_decoder(shape: DecoderShape, deadline: float) -> Iterator[Line]:
    """SwiGLU by itself, then the four kernels of a layer in which divisions are left to the next product."""
    layers = [_layer(shape) for _ in range(NUM_LAYERS + 1)]
    first = layers[0]
    fused = FusedDecoder(layers, max(ROWS), forced({}))
    gated: Places = {("swiglu", *first.gate_up.shape): candidates("swiglu")}
    whole: Places = {
        ("residual", *first.output.shape): candidates("residual"),
        ("scaled-swiglu", *first.gate_up.shape): candidates("scaled-swiglu"),
        ("residual", *first.down.shape): candidates("residual"),
        ("rope", *first.qkv.shape): candidates("rope"),
    }
    swiglu: Chosen = {}
    best: Chosen = {}
    for m in _rows_until(deadline):
        rows = _buffers(first, m)
        start = rows.residual.clone()

        def gated_us(chosen: Chosen, m: int = m) -> float:
            lookup = chosen_alone(chosen)
            parts = [GatedProjection(layer.gate_up, lookup) for layer in layers[:NUM_LAYERS]]
            return layer_us(
                lambda: [part(rows.hidden, rows.wide, rows.narrow, rows.partials) for part in parts],  # noqa: B023
                m,
            )

        def whole_us(chosen: Chosen, m: int = m) -> float:
            if not chosen:
                plain = [_plain_layer(layer, chosen_alone(swiglu)) for layer in layers]  # noqa: B023
                return layer_us(partial(_plain, plain, rows, start), m)  # noqa: B023
            way = fused.using(chosen_alone(chosen))
            way.prepare(rows)  # noqa: B023
            with launching(Early.AFTER_WAIT):
                return layer_us(partial(_steps, way, rows, start), m)  # noqa: B023

        swiglu, times = fastest(gated, swiglu, gated_us)
        yield from _lines(gated, m, swiglu, times)
        found, times = fastest(whole, best, whole_us)
        best = found or best
        yield from _lines(whole, m, found, times)


def _steps(fused: FusedDecoder, rows: DecoderBuffers, start: Tensor) -> None:
    rows.residual.copy_(start)  # see DecoderCase.enqueue
    for index in range(NUM_LAYERS):
        fused.step(index, rows)


def _plain(layers: Sequence[DecoderLayer], rows: DecoderBuffers, start: Tensor) -> None:
    rows.residual.copy_(start)
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
        partials=_random(8 * 1024 * 2 * inner), scratch=one_query_scratch(HEAD_DIM, "cuda"),
    )  # fmt: skip


def _random(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.05)


def _rows_until(deadline: float) -> Iterator[int]:
    for m in sorted(ROWS):
        if time.monotonic() > deadline:
            say(f"out of time at {m} rows")
            return
        yield m


def _lines(places: Places, m: int, best: Chosen, times: tuple[float, float]) -> Iterator[Line]:
    us, plain_us = (round(value, 2) for value in times)
    for key in places:
        epilogue, n, k = key
        name = best[key].kernel.name if key in best else None
        say(f"{epilogue:13} [{n}, {k}] M={m:5} {plain_us:8.2f} us, best {us:8.2f} us: {name or 'not fused'}")
        early = {"early": True} if name is not None and epilogue == "rope" else {}
        yield {
            "epilogue": epilogue,
            "n": n,
            "k": k,
            "min_m": m,
            "kernel": name,
            **early,
            "us": us,
            "plain_us": plain_us,
        }


def write(path: Path, lines: Sequence[Line], measured: Sequence[int]) -> None:
    """The table in use with these lines in it. measured: the numbers of rows that there was a time for.

    From the first for which time did not suffice, a product's lines stay as they are.
    """
    table = in_use(TABLE_PATH, read_choices)
    for key in dict.fromkeys((line["epilogue"], line["n"], line["k"]) for line in lines):
        mine = [line for line in lines if (line["epilogue"], line["n"], line["k"]) == key]
        last = max(int(str(line["min_m"])) for line in mine)
        table = merged(table, mine, min((m for m in measured if m > last), default=None))
    write_choices(path, torch.cuda.get_device_name(), table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    arguments = tuner_parser("rose.layers.tune_fused", __doc__, TABLE_PATH, budget_s=80.0).parse_args(argv)
    deadline = time.monotonic() + arguments.budget_s
    lines: list[Line] = []
    with torch.inference_mode():
        for decoder in LARGE_DECODERS:
            lines += tune_decoder(decoder, deadline)
    write(arguments.out, lines, ROWS)
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
