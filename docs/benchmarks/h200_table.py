"""What is wanted of an H200, and the table of what was found beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roofline import floor_s

from loadgen import compare
from loadgen.results import CaseResult
from loadgen.summary import StreamSummary
from rose.config import ModelConfig, load_config
from rose.model_source import resolve

RATES = ("emb/s", "tokens/s")
HEAD = (
    "| case | figure | here | n | target | vLLM 0.22.0 | times better | share of the floor | worst cosine |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)
NOTES = """
Times in ms, from the intended start where requests have one. n: answers they are of; a quantile q of fewer
than 10/(1−q) is left out. vLLM 0.22.0: on the same kind of GPU, the better run of two settings. Share of the
floor: the least time that the arithmetic (790 TFLOP/s) or reading the weights (4.3 TB/s) of what is under way
can take, over the time that it took. Worst cosine: to fp32, of a sample of the answers that were measured; a
case below 0.999 is invalid and has no figures."""


@dataclass(frozen=True)
class Row:
    """One line: milliseconds (less is better) or embeddings or tokens a second (more is better).

    job: folder of the report. case: as loadgen names it. baseline: vLLM 0.22.0 on the same kind of GPU, its
    better run. baseline, target: None: there is none.
    """

    job: str
    case: str
    figure: str
    baseline: float | None = None
    target: float | None = None

    def met(self, value: float) -> bool:
        """Whether `value` is on the right side of the target; true without one."""
        if self.target is None:
            return True
        return value >= self.target if self.figure in RATES else value <= self.target

    def times_better(self, value: float) -> float | None:
        """Than the baseline."""
        if not self.baseline or not value:
            return None
        return value / self.baseline if self.figure in RATES else self.baseline / value


# What no baseline was measured for.
_BESIDE = (
    *(Row("open", f"1×512, poisson, {load} %", q) for load in (50, 80, 100) for q in ("p50", "p99")),
    *(Row("mixed", f"queries {how}", q) for how in ("alone", "beside 100×512") for q in ("p50", "p99")),
    *(Row("text", f"{level} in flight × 512", "p50") for level in (1, 4, 16)),
    Row("text", "16 in flight × 512", "emb/s"),
    *(Row("concurrency-more", f"{level} in flight × 512", "emb/s") for level in (32, 64)),
)
ROWS = {
    "pplx-embed": (
        Row("latency", "1×128", "p50", 8.96, 1.0),
        Row("latency", "1×128", "p99", 12.05),
        Row("latency", "1×512", "p50", 10.79, 1.6),
        Row("latency", "1×512", "p99", 13.0),
        Row("latency", "1×4096", "p50", 20.3, 12.5),
        Row("polled", "1×128", "p50", None, 1.0),
        Row("polled", "1×128", "p99"),
        Row("polled", "1×512", "p50", None, 1.6),
        Row("polled", "1×512", "p99"),
        Row("scoring", "5×512", "p50", 27.5, 4.8),
        Row("scoring", "25×512", "p50", 42.7, 22.5),
        Row("scoring", "50×512", "p50", 112.9, 45.0),
        Row("throughput", "100×512, 4 processes", "emb/s", 936.0, 1080.0),
        Row("throughput", "100×1024, 4 processes", "emb/s", 309.0, 500.0),
        Row("throughput-4096", "100×4096, 4 processes", "emb/s", 73.4, 82.0),
        Row("concurrency", "1 in flight × 512", "p50", 11.4),
        Row("concurrency", "2 in flight × 512", "p50", 9.8),
        Row("concurrency", "4 in flight × 512", "p50", 22.8),
        Row("concurrency", "8 in flight × 512", "p50", 40.9),
        Row("concurrency", "16 in flight × 512", "p50", 48.4, 15.0),
        Row("concurrency", "16 in flight × 512", "p99", 70.3, 20.0),
        Row("concurrency", "16 in flight × 512", "emb/s"),
        *_BESIDE,
    ),
    "bge-m3": (
        Row("latency", "1×128", "p50", 8.26, 0.85),
        Row("latency", "1×128", "p99", 11.1),
        Row("latency", "1×512", "p50", 8.90, 1.3),
        Row("latency", "1×512", "p99", 12.6),
        Row("latency", "1×4096", "p50", 18.5, 8.0),
        Row("polled", "1×128", "p50", None, 0.85),
        Row("polled", "1×128", "p99"),
        Row("polled", "1×512", "p50", None, 1.3),
        Row("polled", "1×512", "p99"),
        Row("scoring", "5×512", "p50", 31.2, 3.2),
        Row("scoring", "25×512", "p50", 51.8, 15.0),
        Row("scoring", "50×512", "p50", 78.9, 30.0),
        Row("throughput", "100×512, 4 processes", "emb/s", 875.0, 1620.0),
        Row("throughput", "100×1024, 4 processes", "emb/s", 492.0, 780.0),
        Row("throughput-4096", "100×4096, 4 processes", "emb/s", 92.8, 130.0),
        Row("concurrency", "1 in flight × 512", "p50", 9.6),
        Row("concurrency", "4 in flight × 512", "p50", 39.0),
        Row("concurrency", "16 in flight × 512", "p50", 47.9, 11.0),
        Row("concurrency", "16 in flight × 512", "p99", 59.0, 15.0),
        Row("concurrency", "16 in flight × 512", "emb/s"),
        *_BESIDE,
    ),
    "bge-base": tuple(
        Row("short", f"{batch}×{length}, 1024 in flight", figure)
        for length in (50, 512)
        for batch in (1, 16, 64)
        for figure in ("emb/s", "tokens/s", "p50")
    ),
}


def table(model: str, folder: Path) -> Iterator[str]:
    """Markdown lines: one a row of ROWS, with what the reports in `folder` have of it."""
    config = load_config(resolve(model, "dummy").path)
    cases = {row.job: _cases(folder / row.job / "report.json") for row in ROWS[model]}
    yield f"\n## {model}\n\n{HEAD}"
    for row in ROWS[model]:
        yield f"| {' | '.join(_cells(row, cases[row.job].get(row.case), config))} |"


def unmeasured(model: str, folder: Path) -> Iterator[str]:
    """What is not in the reports, or may not be used, and why as far as they say."""
    for job in dict.fromkeys(row.job for row in ROWS[model]):
        path = folder / job / "report.json"
        if not path.exists():
            yield f"{model} {job}: not run"
            continue
        results = compare.read(path)
        yield from (f"{model} {job}: {line}" for line in results.left_out)
        for case in results.cases:
            if not case.valid:
                yield f"{model} {job} {case.name}: {case.failed or case.check}"


def _cases(path: Path) -> dict[str, CaseResult]:
    return {case.name: case for case in compare.read(path).cases} if path.exists() else {}


def _cells(row: Row, case: CaseResult | None, config: ModelConfig) -> Iterator[str]:
    stream = case.streams[0] if case is not None and case.valid and case.streams else None
    value = _figure(stream, row.figure) if stream is not None else None
    yield f"{row.job} {row.case}"
    yield row.figure
    if value is None:
        yield "**INVALID**" if case is not None and not case.valid else "–"
    else:
        yield _shown(value) + ("" if row.target is None else " ✓" if row.met(value) else " ✗")
    yield str(stream.response.count) if stream is not None else "–"
    yield _shown(row.target)
    yield _shown(row.baseline)
    better = row.times_better(value) if value is not None else None
    yield "–" if better is None else f"{better:.1f}"
    share = _share(stream, row.figure, value, config) if stream is not None and value is not None else None
    yield "–" if share is None else f"{share:.0%}"
    yield f"{1 - case.check.deviation:.5f}" if case is not None and case.check is not None else "–"


def _figure(stream: StreamSummary, name: str) -> float | None:
    """A rate, or a quantile in ms from the intended start; None when there were too few answers for it."""
    if name in RATES:
        return stream.embeddings_per_s if name == "emb/s" else stream.tokens_per_s
    return stream.response.told().get(name)


def _share(stream: StreamSummary, figure: str, value: float, config: ModelConfig) -> float | None:
    """The floor of all that is under way together, over the time it took: the median's, or by the rate."""
    batch, _, length = stream.shape.partition("×")
    if stream.rate is not None or figure == "p99" or not length.isdigit() or not value:
        return None
    together = int(batch) * stream.in_flight
    took_s = value / 1e3 if figure == "p50" else together / stream.embeddings_per_s
    return floor_s(config, together, int(length)) / took_s


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
