"""What is plotted, as plain numbers: how it is drawn is somebody else's."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from loadgen.report.table import label
from loadgen.results import CaseResult, Results
from loadgen.summary import StreamSummary

Point = tuple[float, float]
# A plot with more lines than this is unreadable.
MAX_LINES = 12


@dataclass(frozen=True)
class Series:
    """One line. marked: a point to point out, with words."""

    name: str
    points: tuple[Point, ...]
    marked: tuple[Point, str] | None = None


@dataclass(frozen=True)
class Chart:
    """log_x, log_y: decades are equally long. tail: x is 1/(1-q), labelled by q. bars: one bar a series."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    tail: bool = False


def charts(results: Results) -> list[Chart]:
    """The plots of a run; those for which it has no numbers are left out."""
    found = [
        *(_latency_and_rate(results, suite) for suite in ("concurrency", "custom", "short", "open")),
        *(_percentiles(results, suite) for suite in dict.fromkeys(case.suite for case in results.cases)),
        _over_time(results),
        _tokens_per_step(results),
    ]
    return [chart for chart in found if chart.series]


def _latency_and_rate(results: Results, suite: str) -> Chart:
    """Latency against throughput, one line a target and quantile, in the order of the load."""
    lines: dict[str, list[Point]] = {}
    for case, stream in _streams(results, suite):
        target = f"{case.target} " if len(results.targets) > 1 else ""
        kind = f"{stream.pacing} " if suite == "open" else ""
        told = stream.response.told()
        for quantile in ("p50", "p99"):
            if quantile not in told:
                continue
            point = (stream.embeddings_per_s, told[quantile])
            lines.setdefault(f"{target}{kind}{quantile}", []).append(point)
    series = tuple(
        Series(name, tuple(points), _knee(points) if name.endswith("p50") else None)
        for name, points in lines.items()
        if len(points) > 1
    )
    return Chart(f"{suite}: latency against throughput", "embeddings/s", "ms", series, log_y=True)


def _knee(points: list[Point]) -> tuple[Point, str]:
    """Where throughput over latency is greatest: beyond it more load buys mostly waiting.

    Source: L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems", 1979.
    """
    knee = max(points, key=lambda point: point[0] / point[1] if point[1] > 0 else -inf)
    return knee, f"knee: {knee[0]:.0f}/s at {knee[1]:.1f} ms"


def _percentiles(results: Results, suite: str) -> Chart:
    series = []
    for case, stream in _streams(results, suite):
        for kind, distribution in stream.distributions.items():
            points = tuple((1 / (1 - q), ms) for ms, q, _ in distribution.curve if q < 1)
            suffix = f", {kind}" if len(stream.distributions) > 1 else ""
            series.append(Series(label(case, stream, results).removeprefix(f"{suite} ") + suffix, points))
    kept = tuple(line for line in series if line.points)[:MAX_LINES]
    return Chart(
        f"{suite}: latency by percentile", "percentile", "ms", kept, log_x=True, log_y=True, tail=True
    )


def _over_time(results: Results) -> Chart:
    series = [
        Series(label(case, stream, results), tuple((m.at_s, m.p99) for m in stream.timeline))
        for case in results.cases
        for stream in case.streams
        if len(stream.timeline) > 1
    ]
    return Chart("p99 over time", "seconds of the measurement", "ms", tuple(series[:MAX_LINES]), log_y=True)


def _tokens_per_step(results: Results) -> Chart:
    """The server's batches against the rate; nothing for a server that does not count them."""
    lines: dict[str, list[Point]] = {}
    for case in results.cases:
        if case.tokens_per_step is not None and case.streams:
            target = f", {case.target}" if len(results.targets) > 1 else ""
            rate = sum(stream.embeddings_per_s for stream in case.streams)
            lines.setdefault(case.suite + target, []).append((rate, case.tokens_per_step))
    series = tuple(Series(name, tuple(sorted(points))) for name, points in lines.items())
    return Chart("tokens per batch", "embeddings/s", "tokens a step", series)


def _streams(results: Results, suite: str) -> list[tuple[CaseResult, StreamSummary]]:
    return [
        (case, s) for case in results.cases if case.suite == suite for s in case.streams if s.response.count
    ]
