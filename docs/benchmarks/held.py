"""Which fused products hold best at the power limit: each alone, then whole forwards with the best of them.

    python docs/benchmarks/held.py [--model pplx-embed|bge-m3 ...] [--rows 2560 12800] [--batch 25x512 ...]
        [--seconds 300] [--out FILE.json]

Products: every kernel that is built (python -m rose.aot) for a model's weights and each number of rows, and
torch.mm of the same product, which does less; in graphs of eight with a weight each, as one weight would stay
in the L2 cache. Those near the best are held in random order (holding.py), with what the table chooses now.
Forwards: by the table as it is, and by the best kernels of the nearest number of rows in its place, launched
early or not. Prints the time held, its ratio to the table's, and the least cosine of a vector to the table's
own. Random weights, the models' shapes. About five minutes on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from holding import contest
from kernels import DEVICE, PRESETS, Model, batch_of

from rose.aot.products import ProductKernel
from rose.attention.backends import load_backends
from rose.attention.base import AttentionBackend, BatchShape
from rose.attention.policy import choose
from rose.config import load_config
from rose.device_batch import Outputs
from rose.kernels import fused
from rose.kernels.fused import FusedChoice, FusedGemm, FusedKey, RopeColumns
from rose.layers.tune_fused import candidates
from rose.models import bert, qwen3
from rose.weights import DummyWeights

QKV, OUTPUT, GATE_UP, DOWN = (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)
HEADS: tuple[FusedKey, ...] = (("unscaled-rope", *QKV), ("swiglu", *GATE_UP))
FOUR: tuple[FusedKey, ...] = (
    ("residual", *OUTPUT), ("residual", *DOWN), ("scaled-swiglu", *GATE_UP), ("rope", *QKV),
)  # fmt: skip
RMS: tuple[FusedKey, ...] = (("rms-swiglu", *GATE_UP), ("rms-rope", *QKV))
BIAS: tuple[FusedKey, ...] = (("bias", 3072, 1024),)
GELU: tuple[FusedKey, ...] = (("gelu", 4096, 1024),)
# Ways of a forward: products whose best kernels it takes, and those that are not to be fused, as a decoder
# looks for fused ones in the order rms, four, heads (rose.layers.fused_decoder).
WAYS: dict[str, dict[str, tuple[tuple[FusedKey, ...], tuple[FusedKey, ...]]]] = {
    "pplx-embed": {"heads": (HEADS, FOUR + RMS), "four products": (FOUR, RMS)},
    "bge-m3": {"both": (BIAS + GELU, ()), "bias": (BIAS, ()), "gelu, cuBLAS for QKV": (GELU, BIAS)},
}
ROWS, BATCHES, CALLS = (2560, 12800, 25600), ("5x512", "25x512", "50x512", "1x4096"), 8
HOLD_S, ROUNDS = 0.5, 2  # of forwards, which take up to 0.1 s each

Table = Mapping[FusedKey, Sequence[FusedChoice]]
# By product and number of rows, the kernel that held best.
Best = dict[tuple[FusedKey, int], ProductKernel]


def random(*shape: int) -> Tensor:
    """bf16 values around 1."""
    return torch.randn(shape, device=DEVICE).bfloat16()


class Product:
    """What a kernel with this epilogue takes: M rows of K and CALLS weights bf16[N, K], all random."""

    def __init__(self, key: FusedKey, m: int) -> None:
        self.epilogue, n, k = key
        self.x, self.weights = random(m, k), [random(n, k) * 0.02 for _ in range(CALLS)]
        self.out, self.half, self.residual = random(m, n), random(m, n // 2), random(m, n)
        self.columns, self.scale = random(n), torch.rand(m, device=DEVICE) + 0.5
        self.sums = torch.empty(m * (n // 16 + 1), device=DEVICE)
        self.angles = torch.rand(m, 128, device=DEVICE).half()
        # Three quarters of QKV's columns are of queries and keys, the rest of values.
        values = (torch.arange(n, device=DEVICE) >= 3 * n // 4).bfloat16()
        self.heads = RopeColumns(1 - values, values, 3 * n // 4 // 128)

    def enqueue(self, gemm: FusedGemm) -> None:
        """By this kernel, with each weight."""
        call = self._call(gemm)
        for weight in self.weights:
            call(weight)

    def torchs(self) -> None:
        """The bare product by torch, with each weight."""
        for weight in self.weights:
            torch.mm(self.x, weight.t(), out=self.out)

    def _call(self, gemm: FusedGemm) -> Callable[[Tensor], object]:
        x, out, half, columns = self.x, self.out, self.half, self.columns
        scale = self.scale if self.epilogue == "rope" else None
        calls: dict[str, Callable[[Tensor], object]] = {
            "bias": lambda weight: gemm.bias(x, weight, columns, out),
            "gelu": lambda weight: gemm.gelu(x, weight, columns, out),
            "swiglu": lambda weight: gemm.swiglu(x, weight, half),
            "scaled-swiglu": lambda weight: gemm.scaled_swiglu(x, weight, self.scale, half),
            "residual": lambda weight: gemm.residual(x, weight, self.residual, columns, out, self.sums),
            "rope": lambda weight: gemm.rope(x, weight, self.heads, scale, self.angles, out),
        }
        return calls[self.epilogue.removeprefix("unscaled-")]


def time_products(models: Sequence[str], rows: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each product and number of rows, until the time is over."""
    deadline = time.monotonic() + seconds
    keys = dict.fromkeys(key for model in models for taken, _ in WAYS[model].values() for key in taken)
    for key, m in itertools.product(keys, rows):
        if time.monotonic() > deadline:
            print(f"left out: {key} M={m}")
            continue
        yield time_product(key, m)


def time_product(key: FusedKey, m: int) -> dict[str, Any]:
    """Microseconds held of the kernels near the best, of the table's and of torch.mm."""
    epilogue, n, k = key
    product = Product(key, m)
    ways = {gemm.kernel.name: partial(product.enqueue, gemm) for gemm in candidates(epilogue)}
    chosen = fused.choice(fused.table().get(key, ()), m)
    now = chosen.kernel.name if chosen is not None and chosen.kernel is not None else "torch.mm"
    times = contest({**ways, "torch.mm": product.torchs}, kept=["torch.mm", now])
    print(f"{epilogue} [{n}, {k}] M={m}: {len(ways)} kernels", *times.failures.items(), sep="\n  failed: ")
    held = {name: us / CALLS for name, us in sorted(times.held_us.items(), key=lambda item: item[1])}
    for name, us in held.items():
        mark = "  <- now" if name == now else ""
        alone_us, tflops = times.alone_us[name] / CALLS, 2e-6 * m * n * k / us
        print(f"  {us:8.2f} us {tflops:4.0f} TFLOP/s  alone {alone_us:8.2f}  {name}{mark}", flush=True)
    return {"key": key, "m": m, "now": now, "held_us": held, "failures": times.failures}


def best_of(rows: Sequence[dict[str, Any]]) -> Best:
    """The fastest kernel of each row of `time_products` that has one."""
    best: Best = {}
    for row in rows:
        names = [name for name in row["held_us"] if name != "torch.mm"]
        if names:
            fastest = min(names, key=lambda name: float(row["held_us"][name]))
            best[row["key"], row["m"]] = ProductKernel.parse(fastest)
    return best


def nearest(best: Best, key: FusedKey, m: int) -> ProductKernel | None:
    """The best for the nearest number of rows that was measured; None: there is none."""
    measured = [rows for other, rows in best if other == key]
    return best[key, min(measured, key=lambda rows: abs(rows - m))] if measured else None


def changed(table: Table, kernels: Mapping[FusedKey, ProductKernel | None], m: int) -> Table:
    """With these kernels from m rows on, and below as it is."""
    below = {key: [one for one in table.get(key, ()) if one.min_m < m] for key in kernels}
    return {**table, **{key: [*below[key], FusedChoice(m, kernel)] for key, kernel in kernels.items()}}


def launched(table: Table, early: Sequence[FusedKey]) -> Table:
    """With early launches by these products' word only."""
    return {
        key: [replace(one, early=key in early and one.kernel is not None) for one in choices]
        for key, choices in table.items()
    }


def tables(model: str, best: Best, m: int) -> dict[str, Table]:
    """By way, what is in the table's place for forwards of m tokens; "table": itself."""
    found = {"table": fused.table()}
    for way, (taken, left) in WAYS[model].items():
        kernels = {key: nearest(best, key, m) for key in taken}
        if None in kernels.values():
            print(f"left out: {way}, of which a product was not measured")
            continue
        table = changed(fused.table(), {**kernels, **dict.fromkeys(left)}, m)
        found[f"{way}, early"], found[way] = launched(table, taken), launched(table, ())
    return found


@contextmanager
def following(model: Model, table: Table) -> Iterator[None]:
    """Forwards enqueued inside take their products by this table."""
    with ExitStack() as changes:
        changes.enter_context(patch.object(fused, "table", lambda: table))
        if isinstance(model, qwen3.Qwen3Model) and model._fused is not None:
            # A copy without what the model remembers of the table that it had.
            changes.enter_context(patch.object(model, "_fused", model._fused.using(fused.fused_gemm)))
        yield


def time_forwards(name: str, batches: Sequence[str], best: Best) -> Iterator[dict[str, Any]]:
    """A row for each batch of a model."""
    config = load_config(PRESETS / name)
    build: type[Model] = qwen3.Qwen3Model if config.architecture == "qwen3" else bert.BertModel
    shapes = [tuple(map(int, batch.split("x"))) for batch in batches]
    longest = max(num_seqs * length for num_seqs, length in shapes)
    model = build(config, DummyWeights(0, "cuda"), torch.bfloat16, DEVICE, longest)
    backends = load_backends(model.attention_spec, compile_missing=False)
    for num_seqs, length in shapes:
        by_table = tables(name, best, num_seqs * length)
        yield {"model": name, **time_forward(model, backends, (num_seqs, length), by_table)}


def time_forward(
    model: Model, backends: Mapping[str, AttentionBackend], shape: tuple[int, int], ways: Mapping[str, Table]
) -> dict[str, Any]:
    """Microseconds held by way, ratios and least cosines to the table's own."""
    num_seqs, length = shape
    vectors = torch.zeros(num_seqs, model.config.hidden_size, device=DEVICE)
    int8 = torch.zeros_like(vectors, dtype=torch.int8) if model.config.quantizer else None
    attention = choose(model.attention_spec, BatchShape(num_seqs * length, num_seqs, length), tuple(backends))
    batch = batch_of(num_seqs, length, backends[attention])
    made: dict[str, Tensor] = {}

    def enqueue(way: str) -> None:
        with following(model, ways[way]):
            model.forward(batch, Outputs(vectors, int8))

    def keep(way: str) -> None:
        made[way] = vectors.clone()

    times = contest({way: partial(enqueue, way) for way in ways}, ways, keep, HOLD_S, ROUNDS)
    for way, failure in times.failures.items():
        print(f"  failed: {way}: {failure}")
    rows = {}
    for way, us in sorted(times.held_us.items(), key=lambda item: item[1]):
        cosine = torch.cosine_similarity(made["table"], made[way], dim=1).min().item()
        rows[way] = {"us": us, "ratio": us / times.held_us["table"], "cosine": cosine}
        print(
            f"{num_seqs}x{length} {us:9.0f} us {rows[way]['ratio']:.4f}  cosine {cosine:.6f}  {way}",
            flush=True,
        )
    return {"batch": f"{num_seqs}x{length}", "attention": attention, "ways": rows}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All results so far, again after each."""
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"products": [], "forwards": []}
    for row in time_products(arguments.model, arguments.rows, arguments.seconds):
        result["products"].append(row)
        yield result
    best = best_of(result["products"])
    for name in arguments.model:
        for row in time_forwards(name, arguments.batch, best):
            result["forwards"].append(row)
            yield result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=WAYS, action="append", help="repeatable; both by default")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of products")
    parser.add_argument("--batch", nargs="+", default=BATCHES, help="of forwards, sequences x length")
    parser.add_argument("--seconds", type=float, default=300, help="begin no more products after so many")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after each result")
    arguments = parser.parse_args()
    arguments.model = arguments.model or list(WAYS)
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for result in measure(arguments):
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
