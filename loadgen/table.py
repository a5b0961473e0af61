"""The Markdown table: milliseconds first, then rates, in the order in which the article gives them."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.results import CaseResult, Results
from loadgen.summary import QUANTILES, Latency, StreamSummary

COLUMNS = (
    "p50",
    "p90",
    "p99",
    "p99.9",
    "max ms",
    "emb/s",
    "tokens/s",
    "requests",
    "429",
    "errors",
    "client CPU",
)


def markdown(results: Results) -> str:
    """The whole run as text."""
    lines = [f"| case | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    several = len(results.targets) > 1
    for case in results.cases:
        lines += _rows(case, several)
    lines += ["", *_notes(results)]
    return "\n".join(lines) + "\n"


def _rows(case: CaseResult, several: bool) -> Iterator[str]:
    name = f"{case.suite} {case.name}" + (f", {case.target}" if several else "")
    if case.failed is not None:
        yield f"| {name} | {' | '.join('–' for _ in COLUMNS)} |"
    for stream in case.streams:
        label = name if len(case.streams) == 1 else f"{name}, {stream.stream}"
        if stream.send_lag is not None:
            yield f"| {label}, response | {' | '.join(_cells(stream, stream.response))} |"
            label += ", service"
        yield f"| {label} | {' | '.join(_cells(stream, stream.service))} |"


def _cells(stream: StreamSummary, latency: Latency) -> list[str]:
    quantiles = [("~" if name in latency.thin else "") + _ms(latency.quantiles[name]) for name in QUANTILES]
    rates = [f"{stream.embeddings_per_s:.1f}", f"{stream.tokens_per_s:.0f}", str(latency.count)]
    errors = ", ".join(f"{count} {kind}" for kind, count in stream.errors.items()) or "0"
    cpu = f"{max(stream.client_cpu, default=0.0):.0%}"
    return [*quantiles, _ms(latency.max), *rates, str(stream.rejected), errors, cpu]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _notes(results: Results) -> Iterator[str]:
    yield f'Sent: {results.inputs}. "~": fewer than 10/(1−q) samples. Client CPU: of one core.'
    for line in results.left_out:
        yield f"Left out: {line}."
    for case in results.cases:
        name = f"{case.suite} {case.name} on {case.target}"
        if case.failed is not None:
            yield f"FAILED: {name}: {case.failed}."
        for stream in case.streams:
            warmup, measured = stream.warmup, f"measured {stream.window_s:.1f} s"
            yield f"{name}: warm-up {warmup.requests} requests in {warmup.seconds:.1f} s, {measured}."
            yield from (f"WARNING: {name}: {warning}." for warning in stream.warnings)
