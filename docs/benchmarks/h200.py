"""Every HTTP figure of an H200 beside its baseline and its target, for one model or several: one command.

    python docs/benchmarks/h200.py --out DIR [--model NAME] [--suite NAME] [--duration 5] [--no-check]

For each model: a server with random weights of the exact shapes (BF16, msgpack, pre-tokenised ids), then
loadgen's suites against it from other processes; then a second server of the same weights in FP32, to
which a sample of vectors is compared. Writes loadgen's reports to DIR/<model>/<suite>/, and DIR/h200.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import ROOT, Server

# What each suite is given beside --duration.
SUITES = {
    "latency": (),
    "scoring": (),
    "concurrency": ("--in-flight", "1,2,4,8,16"),
    "throughput": (),
    "open": ("--arrivals", "poisson", "--loads", "10,50,80,100,120"),
    "mixed": (),
}
# A request of 100 × 4096 tokens takes seconds.
LONGER = {"throughput": 6.0}


@dataclass(frozen=True)
class Row:
    """One line of the table: milliseconds (less is better) or embeddings a second (more is better).

    case: as loadgen names it. baseline: vLLM 0.22.0 on the same GPU, its best run. target: or None.
    """

    suite: str
    case: str
    figure: str
    baseline: float
    target: float | None


PPLX_EMBED = (
    Row("latency", "1×128", "p50", 8.96, 1.0),
    Row("latency", "1×512", "p50", 10.79, 1.6),
    Row("latency", "1×4096", "p50", 20.3, 12.5),
    Row("scoring", "5×512", "p50", 27.5, 4.8),
    Row("scoring", "25×512", "p50", 42.7, 22.5),
    Row("scoring", "50×512", "p50", 112.9, 45.0),
    Row("throughput", "100×512, 4 processes", "emb/s", 936.0, 1080.0),
    Row("throughput", "100×1024, 4 processes", "emb/s", 309.0, 500.0),
    Row("throughput", "100×4096, 4 processes", "emb/s", 73.4, 82.0),
    Row("concurrency", "1 in flight × 512", "p50", 11.4, None),
    Row("concurrency", "2 in flight × 512", "p50", 9.8, None),
    Row("concurrency", "4 in flight × 512", "p50", 22.8, None),
    Row("concurrency", "8 in flight × 512", "p50", 40.9, None),
    Row("concurrency", "16 in flight × 512", "p50", 48.4, 15.0),
    Row("concurrency", "16 in flight × 512", "p99", 70.3, 20.0),
)
BGE_M3 = (
    Row("latency", "1×128", "p50", 8.26, 0.85),
    Row("latency", "1×512", "p50", 8.90, 1.3),
    Row("latency", "1×4096", "p50", 18.5, 8.0),
    Row("scoring", "5×512", "p50", 31.2, 3.2),
    Row("scoring", "25×512", "p50", 51.8, 15.0),
    Row("scoring", "50×512", "p50", 78.9, 30.0),
    Row("throughput", "100×512, 4 processes", "emb/s", 875.0, 1620.0),
    Row("throughput", "100×1024, 4 processes", "emb/s", 492.0, 780.0),
    Row("throughput", "100×4096, 4 processes", "emb/s", 92.8, 130.0),
    Row("concurrency", "1 in flight × 512", "p50", 9.6, None),
    Row("concurrency", "4 in flight × 512", "p50", 39.0, None),
    Row("concurrency", "16 in flight × 512", "p50", 47.9, 11.0),
    Row("concurrency", "16 in flight × 512", "p99", 59.0, 15.0),
)
TABLES = {"pplx-embed": PPLX_EMBED, "bge-m3": BGE_M3}


def measure(model: str, out: Path, arguments: argparse.Namespace) -> None:
    """Run the suites and the check of `model`; loadgen's reports go to `out`."""
    flags = ["--model", model, "--load-format", "dummy", "--device", "cuda"]
    if arguments.tokenizer:
        flags += ["--tokenizer", str(arguments.tokenizer)]
    with Server(*flags) as server:
        url = f"http://{server.host}:{server.port}"
        brief = ("--quick", "--requests", "1000000") if arguments.short_warmup else ()
        for suite in arguments.suite or SUITES:
            seconds = arguments.duration * LONGER.get(suite, 1.0)
            loadgen(suite, url, out / suite, "--duration", f"{seconds:g}", *SUITES[suite], *brief)
        if arguments.tokenizer and arguments.corpus:
            text = ("--corpus", str(arguments.corpus), "--tokenizer", str(arguments.tokenizer))
            seconds = f"{arguments.duration:g}"
            loadgen(
                "concurrency", url, out / "text", "--duration", seconds, *SUITES["concurrency"], *brief, *text
            )
        if arguments.check:
            with Server(*flags, "--dtype", "float32") as reference:
                check = f"http://{reference.host}:{reference.port}"
                loadgen("latency", url, out / "check", "--quick", "--no-overhead", "--check", check)


def loadgen(suite: str, url: str, out: Path, *flags: str) -> None:
    """One suite, reported to `out`."""
    command = [sys.executable, "-m", "loadgen", suite, "--url", url, "--report", str(out), *flags]
    subprocess.run(command, cwd=ROOT, check=False)


def found(results: Path, row: Row) -> float | None:
    """The figure of `row` in loadgen's JSON, or None if that case was not measured or is invalid."""
    path = results / row.suite / "report.json"
    for case in json.loads(path.read_text("utf-8"))["cases"] if path.exists() else ():
        if case["name"] == row.case and case["streams"]:
            return figure(case["streams"][0], row.figure)
    return None


def figure(stream: dict[str, Any], name: str) -> float:
    """emb/s, or a quantile of the service time in ms."""
    return float(stream["embeddings_per_s"] if name == "emb/s" else stream["service"]["quantiles"][name])


def lines(model: str, results: Path) -> Iterator[str]:
    """The Markdown table of `model`."""
    yield f"\n## {model}\n\n| case | figure | here | target | vLLM 0.22.0 | times better |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in TABLES[model]:
        value = found(results, row)
        if value is None:
            yield f"| {row.suite} {row.case} | {row.figure} | – | {row.target or '–'} | {row.baseline} | – |"
            continue
        ratio = value / row.baseline if row.figure == "emb/s" else row.baseline / value
        met = "" if row.target is None else (" ✓" if reached(row, value) else " ✗")
        shown = f"{value:.2f}" if value < 100 else f"{value:.0f}"
        yield (
            f"| {row.suite} {row.case} | {row.figure} | {shown}{met} | {row.target or '–'} "
            f"| {row.baseline} | {ratio:.1f} |"
        )


def reached(row: Row, value: float) -> bool:
    """Whether `value` is on the right side of the target, if there is one."""
    if row.target is None:
        return True
    return value >= row.target if row.figure == "emb/s" else value <= row.target


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, then write and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=sorted(TABLES), help="repeatable; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    parser.add_argument("--duration", type=float, default=5.0, help="seconds a case is measured")
    parser.add_argument("--suite", action="append", choices=sorted(SUITES), help="repeatable; default: all")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json: with --corpus, text at concurrency too"
    )
    parser.add_argument("--corpus", type=Path, help="text file or folder")
    parser.add_argument("--short-warmup", action="store_true", help="a second of warm-up a case, at most")
    parser.add_argument("--no-check", dest="check", action="store_false", help="compare no vectors with FP32")
    parser.add_argument("--table-only", action="store_true", help="only rewrite the table from DIR's files")
    arguments = parser.parse_args(argv)
    text = ["# One H200, HTTP with msgpack, BF16, random weights of the exact shapes"]
    for model in arguments.model or sorted(TABLES, reverse=True):
        if not arguments.table_only:
            measure(model, arguments.out / model, arguments)
        text += lines(model, arguments.out / model)
    (arguments.out / "h200.md").write_text("\n".join(text) + "\n", "utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
