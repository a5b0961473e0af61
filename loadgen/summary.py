"""From recordings to numbers: exact quantiles, rates, errors, and what the client itself cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from loadgen.conductor import StreamRun, Warmup
from loadgen.histogram import encode, percentile_curve
from loadgen.recording import SERVER_PARTS, Beat, Floats, Recording

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
# A quantile q wants this many samples beyond it: 10 / (1 - q) in all.
SAMPLES_BEYOND = 10
BUSY_CLIENT = 0.8
# More failures than these hide what a p99 would have shown.
MANY_FAILED = 0.005
# An open loop that gets less than this share of its work done is beyond what the server can do.
KEPT_UP, FEW = 0.95, 100
MAX_SLICES = 120
LATE_SENDS_MS = 1.0


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds. thin: the quantiles with fewer than 10 / (1 - q) samples, which no report shows."""

    count: int
    mean: float
    quantiles: dict[str, float]
    max: float
    thin: list[str]

    def told(self) -> dict[str, float]:
        """The quantiles that its samples suffice for."""
        return {name: ms for name, ms in self.quantiles.items() if name not in self.thin}


class Distribution(msgspec.Struct, frozen=True):
    """All latencies of a window. curve: (ms, quantile, count). hdr: base64 of an HdrHistogram of µs."""

    stdev: float
    curve: list[tuple[float, float, int]]
    hdr: str


class Moment(msgspec.Struct, frozen=True):
    """What ended in one slice of a window. at_s: its middle, after the window's start. Latencies in ms."""

    at_s: float
    count: int
    p50: float
    p99: float
    max: float


class StreamSummary(msgspec.Struct, frozen=True):
    """One line of the report.

    response: from the intended start to the last byte. service: from the actual send (a closed loop's too).
    send_lag: actual minus intended start. client_cpu: of one core, for each process.
    server_ms: p50 and p99 of what the response headers tell. distributions: "response" and "service"; of a
    closed loop, where they are the same, "service" only.
    """

    stream: str
    shape: str
    pacing: str
    rate: float | None
    in_flight: int
    processes: int
    response: Latency
    service: Latency
    send_lag: Latency | None
    embeddings_per_s: float
    tokens_per_s: float
    requests_per_s: float
    window_s: float
    warmup: Warmup
    distributions: dict[str, Distribution]
    timeline: list[Moment]
    rejected: int
    errors: dict[str, int]
    client_cpu: list[float]
    server_ms: dict[str, dict[str, float]]
    warnings: list[str]


def latency(seconds: Floats) -> Latency:
    """Exact quantiles (nearest rank) of `seconds` f64[n], in milliseconds."""
    if not len(seconds):
        return Latency(0, 0.0, dict.fromkeys(QUANTILES, 0.0), 0.0, list(QUANTILES))
    ms = seconds * 1e3
    ranks = np.quantile(ms, list(QUANTILES.values()), method="inverted_cdf")
    thin = [name for name, q in QUANTILES.items() if len(ms) * (1 - q) < SAMPLES_BEYOND - 1e-6]
    quantiles = dict(zip(QUANTILES, ranks.tolist(), strict=True))
    return Latency(len(ms), float(ms.mean()), quantiles, float(ms.max()), thin)


def summarise(run: StreamRun) -> StreamSummary:
    """The numbers of one stream."""
    stream, window_s = run.stream, run.end_s - run.start_s
    windows = [in_window(recording, run) for recording in run.recordings]
    pairs = list(zip(run.recordings, windows, strict=True))
    response = _joined([r.done_s[w] - r.intended_s[w] for r, w in pairs])
    service = _joined([r.done_s[w] - r.sent_s[w] for r, w in pairs])
    lag = _joined([r.sent_s[w] - r.intended_s[w] for r, w in pairs])
    kinds = Counter(
        kind for r in run.recordings for at_s, kind in r.errors if run.start_s <= at_s < run.end_s
    )
    rejected = kinds.pop("http 429", 0)
    cpu = [client_cpu(recording.beats, run.start_s, run.end_s) for recording in run.recordings]
    items = np.sum([_worked(r, run) for r in run.recordings], axis=0) / window_s
    send_lag = latency(lag) if stream.is_open else None
    return StreamSummary(
        stream=stream.name,
        shape=str(stream.shape),
        pacing=stream.pacing.value,
        rate=stream.rate if stream.is_open else None,
        in_flight=stream.in_flight * stream.processes,
        processes=stream.processes,
        response=latency(response),
        service=latency(service),
        send_lag=send_lag,
        requests_per_s=float(items[0]),
        embeddings_per_s=float(items[1]),
        tokens_per_s=float(items[2]),
        window_s=window_s,
        warmup=run.warmup,
        distributions=_distributions(response, service, stream.is_open),
        timeline=timeline(_joined([r.done_s[w] for r, w in pairs]) - run.start_s, response, window_s),
        rejected=rejected,
        errors=dict(kinds),
        client_cpu=cpu,
        server_ms=_server_split(np.concatenate([r.server_ms[w] for r, w in pairs])),
        warnings=[
            *_warnings(run, cpu, send_lag, len(response)),
            *_biases(run, len(response), kinds.total() + rejected, float(items[0]) * window_s),
        ],
    )


def _distributions(response: Floats, service: Floats, is_open: bool) -> dict[str, Distribution]:
    kinds = {"response": response, "service": service} if is_open else {"service": service}
    return {
        name: Distribution(
            float(seconds.std() * 1e3) if len(seconds) else 0.0, percentile_curve(seconds), encode(seconds)
        )
        for name, seconds in kinds.items()
    }


def timeline(ended_s: Floats, seconds: Floats, window_s: float) -> list[Moment]:
    """Latencies f64[n] by when they ended, f64[n] seconds after the window's start, by about a second."""
    slices = max(1, min(MAX_SLICES, round(window_s)))
    width_s = window_s / slices
    number = np.floor(ended_s / width_s).astype(int)
    moments = []
    # An open loop's requests may end after the window.
    for at in np.unique(number):
        part = latency(seconds[number == at])
        middle = (float(at) + 0.5) * width_s
        moments.append(Moment(middle, part.count, part.quantiles["p50"], part.quantiles["p99"], part.max))
    return moments


def in_window(recording: Recording, run: StreamRun) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which requests count: of an open loop those due in the window, else those ended in it."""
    at_s = recording.intended_s if run.stream.is_open else recording.done_s
    return (at_s >= run.start_s) & (at_s < run.end_s)


def _worked(recording: Recording, run: StreamRun) -> Floats:
    """Requests, sequences and tokens done in the window; a request across an edge counts in proportion.

    Counting whole requests would be off by a burst: 4 clients × 100 sequences end together.
    """
    inside_s = np.minimum(recording.done_s, run.end_s) - np.maximum(recording.sent_s, run.start_s)
    share = np.clip(inside_s / np.maximum(recording.done_s - recording.sent_s, 1e-9), 0.0, 1.0)
    sequences, tokens = recording.sequences[recording.request], recording.tokens[recording.request]
    return np.array([share.sum(), share @ sequences, share @ tokens])


def client_cpu(beats: tuple[Beat, ...], start_s: float, end_s: float) -> float:
    """The share of one core that a client used in the window, from the beats nearest to its edges."""
    if len(beats) < 2:
        return 0.0
    first = min(beats[:-1], key=lambda beat: abs(beat.at_s - start_s))
    last = min((beat for beat in beats if beat.at_s > first.at_s), key=lambda beat: abs(beat.at_s - end_s))
    return (last.cpu_s - first.cpu_s) / (last.at_s - first.at_s)


def _server_split(server_ms: Floats) -> dict[str, dict[str, float]]:
    split = {}
    for part, values in zip(SERVER_PARTS, server_ms.T, strict=True):
        told = values[~np.isnan(values)]
        if len(told):
            p50, p99 = np.quantile(told, [0.5, 0.99], method="inverted_cdf")
            split[part] = {"p50": float(p50), "p99": float(p99)}
    return split


def _warnings(run: StreamRun, cpu: list[float], send_lag: Latency | None, samples: int) -> list[str]:
    found = []
    if max(cpu, default=0.0) > BUSY_CLIENT and not run.stream.polls:
        found.append(f"a client used {max(cpu):.0%} of a core: the client may be what is measured")
    if not run.warmup.settled:
        found.append(f"the rate was not seen to settle in the warm-up of {run.warmup.seconds:.1f} s")
    if send_lag is not None and send_lag.quantiles["p99"] > LATE_SENDS_MS:
        found.append(
            f"sends were late, p99 {send_lag.quantiles['p99']:.1f} ms: the client could not keep its times"
        )
    if not samples:
        found.append("no request was answered in the window")
    return found


def _biases(run: StreamRun, answered: int, failed: int, done: float) -> list[str]:
    """Where the quantiles say less than they seem to. done: requests' worth of work in the window."""
    found, due = [], answered + failed
    if failed > MANY_FAILED * due:
        found.append(
            f"{failed / due:.1%} of the requests got no vectors, and the quantiles are of the others"
        )
    if run.stream.is_open and run.stream.trace is None and due >= FEW and done < KEPT_UP * due:
        found.append(
            f"{done:.0f} of {due} requests' work was done in time: the queue grew, and with it all latencies,"
            " for as long as this was measured"
        )
    return found


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0)
