"""The Markdown tables: milliseconds first, then rates, in the order in which the article gives them."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.compare import columns_of_targets
from loadgen.compare import table as comparison
from loadgen.recording import SERVER_PARTS
from loadgen.results import CaseResult, Results
from loadgen.summary import QUANTILES, Latency, StreamSummary

# Of what client and echo server do together; with a slower server the client has cores to itself.
BUSY_SHARE = 0.5
COLUMNS = (*QUANTILES, "max ms", "n", "emb/s", "tokens/s", "429", "errors", "client CPU")


def markdown(results: Results) -> str:
    """The whole run as text."""
    several = len(results.targets) > 1
    lines = [_row("case", *COLUMNS), "|---|" + "---:|" * len(COLUMNS)]
    for case in results.cases:
        lines += _rows(case, results)
    if several:
        lines += ["", comparison(columns_of_targets(results)).rstrip()]
    split = list(_server_rows(results))
    if split:
        heads = [f"{part} {q}" for part in SERVER_PARTS for q in ("p50", "p99")]
        lines += ["", _row("inside the server, ms", *heads, "tokens a step")]
        lines += ["|---|" + "---:|" * (len(heads) + 1), *split]
    lines += ["", *(f"- {note}" for note in _notes(results))]
    return "\n".join(lines) + "\n"


def label(case: CaseResult, stream: StreamSummary | None, results: Results) -> str:
    """What a line of a table or plot is called."""
    name = f"{case.suite} {case.name}"
    if stream is not None and stream.stream != "requests":
        name += f", {stream.stream}"
    if len(results.targets) > 1:
        name += f", {case.target}"
    rounds = max(other.number for other in results.cases)
    return name + (f" #{case.number + 1}" if rounds else "")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rows(case: CaseResult, results: Results) -> Iterator[str]:
    mark = "" if case.valid else " **INVALID**"
    if case.failed is not None:
        yield _row(label(case, None, results) + mark, *("–" for _ in COLUMNS))
    for stream in case.streams:
        name = label(case, stream, results)
        if stream.rate is None:
            yield _row(name + mark, *_cells(stream, stream.service))
        else:
            yield _row(f"{name}, response{mark}", *_cells(stream, stream.response))
            yield _row(f"{name}, service{mark}", *_cells(stream, stream.service))


def _cells(stream: StreamSummary, latency: Latency) -> list[str]:
    told = latency.told()
    quantiles = [_ms(told[name]) if name in told else "–" for name in QUANTILES]
    rates = [f"{stream.embeddings_per_s:.1f}", f"{stream.tokens_per_s:.0f}"]
    errors = ", ".join(f"{count} {kind}" for kind, count in stream.errors.items()) or "0"
    cpu = f"{max(stream.client_cpu, default=0.0):.0%}"
    return [*quantiles, _ms(latency.max), str(latency.count), *rates, str(stream.rejected), errors, cpu]


def _server_rows(results: Results) -> Iterator[str]:
    for case in results.cases:
        for stream in case.streams:
            told = [stream.server_ms.get(part, {}).get(q) for part in SERVER_PARTS for q in ("p50", "p99")]
            if any(value is not None for value in told) or case.tokens_per_step is not None:
                cells = ["–" if value is None else _ms(value) for value in told]
                step = "–" if case.tokens_per_step is None else f"{case.tokens_per_step:.0f}"
                yield _row(label(case, stream, results), *cells, step)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _notes(results: Results) -> Iterator[str]:
    yield f"Sent: {results.inputs}. n: answers that the quantiles are of; –: a quantile q wants 10/(1−q)."
    yield "Client CPU: of one core."
    if results.resumed:
        yield f"Begun {results.started}, gone on with {', '.join(results.resumed)}."
    if results.overhead is not None:
        p50, p99 = results.overhead.quantiles["p50"], results.overhead.quantiles["p99"]
        yield f"The client itself, 1×512 against an echo server: p50 {p50:.3f} ms, p99 {p99:.3f} ms."
    yield from (f"Left out: {line}." for line in results.left_out)
    for case in results.cases:
        if case.failed is not None:
            yield f"FAILED: {label(case, None, results)}: {case.failed}."
        yield from _client_notes(case, results)
        if case.check is not None:
            yield f"Check of {label(case, None, results)}: {case.check}."
        for stream in case.streams:
            yield from _stream_notes(label(case, stream, results), stream)


def _client_notes(case: CaseResult, results: Results) -> Iterator[str]:
    """What the client reaches by itself at this load, and a warning when it may be what was measured."""
    alone = results.alone.get(f"{case.suite} {case.name}")
    if alone is None or not case.streams:
        return
    name, share = label(case, None, results), case.streams[0].embeddings_per_s / alone
    yield f"{name}: client and an echo server alone reach {alone:.0f} emb/s; this is {share:.0%} of it."
    if share > BUSY_SHARE:
        yield f"WARNING: {name}: the client may be what is measured."


def _stream_notes(name: str, stream: StreamSummary) -> Iterator[str]:
    warmup = stream.warmup
    warm = f"warm-up {warmup.requests} requests in {warmup.seconds:.1f} s, measured {stream.window_s:.1f} s"
    if stream.send_lag is None:
        yield f"{name}: {warm}."
    else:
        lag = stream.send_lag.quantiles
        yield f"{name}: {stream.rate:.1f}/s, {warm}, late sends p50 {_ms(lag['p50'])}, p99 {_ms(lag['p99'])}."
    yield from (f"WARNING: {name}: {warning}." for warning in stream.warnings)
