"""Time whole layers, attention included, by all that is built, and say which choices win.

    python -m rose.layers.tune_layers --out FILE.json [--table FILE.json] [--model pplx-embed | bge-m3]
        [--batch 5x512 ...]

One choice after another is changed, and kept if the layer got faster: kernels that are brought up while the
one before still runs gain by their neighbours, so a product alone says little. The first layers of every way
are compared with fp32 before it is timed; one that is off by half more than the base is not. --out gets all
that was measured, --table the table of products in use with the best of it, as rose.kernels.fused reads it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rose.aot.products import ProductKernel
from rose.aot.variants import GEMM
from rose.kernels.fused import TABLE_PATH
from rose.kernels.tables import in_use, read_choices, say, write_choices
from rose.kernels.timing import graph_us
from rose.layers.decoder_case import DecoderCase
from rose.layers.encoder_case import EncoderCase
from rose.layers.layer_case import Case, Places, Sequences, Way
from rose.layers.layer_table import Line, lines_of, merged
from rose.layers.tune_fused import MIN_GAIN
from rose.layers.tune_fused import ROWS as MANY_ROWS

BATCHES = tuple(Sequences(1, length) for length in (512, 1024, 768, 1536))
# What is measured at one of these numbers of rows holds up to the next; between them the table is put right
# by hand, where a choice would start a second wave of tiles (docs/benchmarks/log.md).
MEASURED = sorted({*(batch.rows for batch in BATCHES), *MANY_ROWS})
# So many rows take more power than a GPU may draw, and its clock falls within a fifth of a second: what is
# fastest then is what counts for them.
HELD_ROWS, HOLD_US = 2048, 250_000
# The mode that a mode takes from what both have; only the rest is searched, and how kernels are launched.
LIKE = {"heads": "plain", "factors": "sums"}
CASES: Mapping[str, Callable[[Sequences, torch.device], Case]] = {
    "pplx-embed": DecoderCase,
    "bge-m3": EncoderCase,
}


class Search:
    """Times of ways, each measured once, in µs a layer; infinite: too far from fp32, or out of time."""

    def __init__(self, case: Case, deadline: float) -> None:
        self._case, self._deadline, self._limit = case, deadline, math.inf
        self.times: dict[tuple[tuple[str, str | None], ...], tuple[float, float]] = {}
        self._limit = 1.5 * self.measure(case.base)[1]

    def measure(self, way: Way) -> tuple[float, float]:
        """µs a layer and error."""
        key = tuple(sorted(way.items()))
        if key not in self.times and time.monotonic() < self._deadline:
            error, us = self._case.error(way), math.inf
            if error <= self._limit:
                us = self._layer_us(way)
            self.times[key] = (us, error)
        return self.times.get(key, (math.inf, math.inf))

    def _layer_us(self, way: Way) -> float:
        layers = self._case.num_layers
        run = self._case.enqueue(way, layers)
        us = graph_us(run, 4, 3)
        if self._case.m >= HELD_ROWS:
            us = graph_us(run, max(4, round(HOLD_US / us)), 2)
        return us / layers

    def report(self, mode: str, way: Way) -> None:
        """Say how a way does."""
        us, error = self.measure(way)
        names = ", ".join(f"{place} {name or 'cuBLAS'}" for place, name in way.items() if place != "mode")
        say(f"  {mode:8} {us:6.2f} us a layer, error {error:.5f}: {names}")

    def descend(self, way: Way, places: Places, sweeps: int = 3) -> Way:
        """From `way`, one place after another by its best choice, until a sweep gains next to nothing."""
        best_us, _ = self.measure(way)
        for _ in range(sweeps):
            before = best_us
            for place, names in places.items():
                for name in names:
                    us, _ = self.measure({**way, place: name})
                    if us < best_us:
                        way, best_us = {**way, place: name}, us
            if best_us > 0.995 * before:
                break
        return way


def search(case: Case, deadline: float) -> dict[str, Any]:
    """The base, the best of each mode, and all that was measured."""
    found = Search(case, deadline)
    best: dict[str, Way] = {"base": case.base}
    found.report("base", case.base)
    for mode, built in case.modes.items():
        places = {place: fitting(names, case.m) for place, names in built.items()}
        if not all(places.values()):
            say(f"  {mode}: none of some kernel is built")
            continue
        like = best.get(LIKE.get(mode, "base" if mode == "plain" else ""), {})
        shared = {place: like[place] for place in places if place in like and like[place] in places[place]}
        start: Way = {"mode": mode, **{place: names[0] for place, names in places.items()}, **shared}
        kept = shared.keys() - {"early"} if mode in LIKE else set()
        searched = {place: names for place, names in places.items() if place not in kept}
        best[mode] = found.descend(start, searched)
        found.report(mode, best[mode])
    measured = [
        {"us": us, "error": error, **dict(way)}
        for way, (us, error) in sorted(found.times.items(), key=lambda one: one[1])
    ]
    return {"best": best, "measured": measured}


def fitting(names: Sequence[str | None], rows: int) -> list[str | None]:
    """Without the products whose clusters of several tiles have more rows: they compute NaN."""

    def fits(name: str | None) -> bool:
        if name is None or not name.startswith(GEMM):
            return True
        kernel = ProductKernel.parse(name)
        return kernel.cluster_m == 1 or kernel.tile_m * kernel.cluster_m <= rows

    return [name for name in names if fits(name)]


def best_lines(case: Case, found: Mapping[str, Any], rows: int) -> list[Line]:
    """Of the table: what was fastest, if by MIN_GAIN."""
    measured = {tuple(sorted(case.base.items())): math.inf}
    measured |= {_key(one): one["us"] for one in found["measured"]}
    base_us = measured[_key(case.base)]
    ways = sorted(found["best"].values(), key=lambda way: measured.get(_key(way), math.inf))
    best_us = measured.get(_key(ways[0]), math.inf)
    if not best_us < base_us * (1 - MIN_GAIN):
        return lines_of(case, case.base, rows, (base_us, base_us))
    return lines_of(case, ways[0], rows, (best_us, base_us))


def updated(table: Sequence[Line], lines: Sequence[Line]) -> list[Line]:
    """`table` with what was measured; each number's lines hold up to the next of MEASURED."""
    result = [*table]
    for rows in sorted({line["min_m"] for line in lines}):
        mine = [line for line in lines if line["min_m"] == rows]
        result = merged(result, mine, next((more for more in MEASURED if more > rows), None))
    return result


def _key(way: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((place, name) for place, name in way.items() if place not in ("us", "error")))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m rose.layers.tune_layers", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--table", type=Path, help="the JSON table to write")
    parser.add_argument("--model", action="append", choices=[*CASES], help="only this one; repeatable")
    parser.add_argument(
        "--batch", type=Sequences.parse, action="append", help="sequences x length, as 5x512; repeatable"
    )
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--budget-s", type=float, default=60.0, help="stop measuring after this many seconds")
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.budget_s
    jobs = [(model, batch) for batch in arguments.batch or BATCHES for model in arguments.model or CASES]
    found: dict[str, object] = {}
    lines: list[Line] = []
    with torch.inference_mode():
        for done, (model, batch) in enumerate(jobs):
            say(f"{model}, {batch}")
            case, now = CASES[model](batch, arguments.device), time.monotonic()
            results = search(case, now + max(deadline - now, 0.0) / (len(jobs) - done))
            found[f"{model} {batch}"] = results
            arguments.out.write_text(json.dumps(found, indent=1))
            lines += best_lines(case, results, batch.rows)
    if arguments.table is not None:
        table = updated(in_use(TABLE_PATH, read_choices), lines)
        write_choices(arguments.table, torch.cuda.get_device_name(), table)
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
