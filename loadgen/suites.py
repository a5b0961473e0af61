"""The suites: which cases each one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen import trace as traces
from loadgen.plan import Case, Limits, LoadgenError, Pacing, Shape, Stream

SEQUENTIAL = Limits(requests=1000, min_s=3.0, max_s=30.0)
SCORING = Limits(requests=500, min_s=3.0, max_s=30.0)
THROUGHPUT = Limits(warmup_requests=16, requests=200, min_s=10.0, max_s=30.0)
CONCURRENT = Limits(warmup_requests=200, requests=2000, min_s=5.0, max_s=30.0)
# 1024 requests in flight ten times over; a server that takes seconds for a round is warm after one.
SHORT = Limits(warmup_requests=1024, requests=10_240, min_s=3.0, max_s=30.0)
# A schedule is measured for max_s; 10 s at 100 requests a second are enough for a p99.
OPEN = Limits(warmup_s=2.0, max_warmup_s=5.0, max_s=10.0)
MIXED = Limits(warmup_s=3.0, max_s=15.0)
QUICK = Limits(warmup_requests=5, warmup_s=0.3, max_warmup_s=1.0, requests=20, min_s=0.3, max_s=2.0)
LOADS = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120)
# Enough in flight that a server's batches are full, which is what "can do at most" means.
SATURATING = 64
QUERIES_PER_S = 100.0
MAX_TRACE_S = 3600.0


@dataclass(frozen=True)
class Custom:
    """What the command line changes of a suite; None leaves it. lengths: tokens a sequence.

    rate: requests a second. loads: percent of what the server can do at most.
    """

    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    in_flight: tuple[int, ...] | None = None
    processes: int | None = None
    requests: int | None = None
    rate: float | None = None
    loads: tuple[int, ...] | None = None
    arrivals: Pacing | None = None
    duration_s: float | None = None
    warmup_s: float | None = None
    max_warmup_s: float | None = None
    timeout_s: float | None = None
    trace: Path | None = None
    quick: bool = False

    def limits(self, default: Limits) -> Limits:
        """`default` with what was asked for."""
        limits = replace(QUICK, timeout_s=default.timeout_s) if self.quick else default
        if self.requests is not None:
            limits = replace(limits, requests=self.requests)
        if self.duration_s is not None:
            limits = replace(limits, min_s=min(limits.min_s, self.duration_s), max_s=self.duration_s)
        if self.warmup_s is not None:
            longest_s = max(limits.max_warmup_s, self.warmup_s)
            limits = replace(limits, warmup_s=self.warmup_s, max_warmup_s=longest_s)
        if self.max_warmup_s is not None:
            shortest_s = min(limits.warmup_s, self.max_warmup_s)
            limits = replace(limits, warmup_s=shortest_s, max_warmup_s=self.max_warmup_s)
        if self.timeout_s is not None:
            limits = replace(limits, timeout_s=self.timeout_s)
        return limits


def latency(custom: Custom) -> Iterator[Case]:
    """One sequence at a time."""
    for length in custom.lengths or (128, 512, 4096):
        shape = Shape(1, length, length)
        yield Case("latency", str(shape), (Stream(shape),), custom.limits(SEQUENTIAL))


def polled(custom: Custom) -> Iterator[Case]:
    """As `latency`, by a client that does not sleep: none of what is measured is its own waking up."""
    for case in latency(custom):
        yield replace(case, suite="polled", streams=tuple(replace(one, polls=True) for one in case.streams))


def scoring(custom: Custom) -> Iterator[Case]:
    """Batches of a few sequences, one request at a time."""
    for length in custom.lengths or (512,):
        for batch in custom.batches or (5, 25, 50):
            shape = Shape(batch, length, length)
            yield Case("scoring", str(shape), (Stream(shape),), custom.limits(SCORING))


def throughput(custom: Custom) -> Iterator[Case]:
    """Large batches from several client processes, each with one request under way."""
    for length in custom.lengths or (512, 1024, 4096):
        for batch in custom.batches or (100,):
            shape, processes = Shape(batch, length, length), custom.processes or 4
            stream = Stream(shape, processes=processes, in_flight=(custom.in_flight or (1,))[0])
            yield Case("throughput", f"{shape}, {processes} processes", (stream,), custom.limits(THROUGHPUT))


def concurrency(custom: Custom) -> Iterator[Case]:
    """Many clients with one sequence each; text, when there is a corpus."""
    levels = custom.in_flight or ((1, 2, 4) if custom.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256))
    for length in custom.lengths or (512,):
        for level in levels:
            shape = Shape(1, length, length)
            stream = Stream(shape, in_flight=level)
            yield Case("concurrency", f"{level} in flight × {length}", (stream,), custom.limits(CONCURRENT))


def short(custom: Custom) -> Iterator[Case]:
    """More short texts than a small model can do, over many connections; the client is measured first."""
    processes = custom.processes or 4
    level = (custom.in_flight or (2 if custom.quick else 256,))[0]
    for length in custom.lengths or (50, 512):
        for batch in custom.batches or (1, 16, 64):
            shape = Shape(batch, length, length)
            stream = Stream(shape, in_flight=level, processes=processes)
            name = f"{shape}, {level * processes} in flight"
            yield Case("short", name, (stream,), custom.limits(SHORT), alone=True)


def open_loop(custom: Custom) -> Iterator[Case]:
    """Requests at their own times, whatever the server does: at a rate, or at shares of what it can do."""
    pacings = (custom.arrivals,) if custom.arrivals else (Pacing.POISSON, Pacing.CONSTANT)
    loads = custom.loads or ((50, 90) if custom.quick else LOADS)
    for shape in _shapes(custom):
        for pacing in pacings:
            stream = Stream(shape, pacing=pacing, processes=custom.processes or 1)
            if custom.rate is not None:
                name = f"{shape}, {pacing.value}, {custom.rate:g}/s"
                yield Case("open", name, (replace(stream, rate=custom.rate),), custom.limits(OPEN))
                continue
            for load in loads:
                name = f"{shape}, {pacing.value}, {load} %"
                yield Case("open", name, (replace(stream, load=load / 100),), custom.limits(OPEN))


def mixed(custom: Custom) -> Iterator[Case]:
    """Short queries, alone and then beside batch traffic that never pauses."""
    rate = custom.rate or (20.0 if custom.quick else QUERIES_PER_S)
    queries = Stream(Shape(1, 8, 32), "queries", custom.arrivals or Pacing.POISSON, rate=rate)
    length, batch = (custom.lengths or (512,))[0], (custom.batches or (100,))[0]
    batches = Stream(Shape(batch, length, length), "batches", processes=custom.processes or 2)
    yield Case("mixed", "queries alone", (queries,), custom.limits(MIXED))
    yield Case("mixed", f"queries beside {batches.shape}", (queries, batches), custom.limits(MIXED))


def custom_loop(custom: Custom) -> Iterator[Case]:
    """A closed loop of exactly what the flags say."""
    for shape in _shapes(custom):
        for level in custom.in_flight or (1,):
            processes = custom.processes or 1
            stream = Stream(shape, in_flight=level, processes=processes)
            name = f"{shape}, {level * processes} in flight"
            yield Case("custom", name, (stream,), custom.limits(SEQUENTIAL))


def trace(custom: Custom) -> Iterator[Case]:
    """Recorded traffic, replayed at its own times."""
    if custom.trace is None:
        raise LoadgenError("the suite trace needs --trace FILE")
    entries = traces.read(custom.trace)
    sizes = [length for entry in entries for length in entry.lengths] or [1]
    shape = Shape(max(len(entry.lengths or entry.texts) for entry in entries), min(sizes), max(sizes))
    # The last request must still be inside the window.
    length_s = min(custom.duration_s or MAX_TRACE_S, entries[-1].at_s + 0.001)
    stream = Stream(shape, pacing=Pacing.TRACE, processes=custom.processes or 1, trace=custom.trace)
    limits = replace(custom.limits(OPEN), warmup_s=0.0, max_s=length_s)
    yield Case("trace", custom.trace.name, (stream,), limits)


def saturation(case: Case) -> Case:
    """What is measured first, to know the rate of which an open loop takes shares."""
    stream = case.streams[0]
    limits = replace(case.limits, requests=10**9)
    full = Stream(stream.shape, in_flight=SATURATING // stream.processes, processes=stream.processes)
    return Case("open", f"{stream.shape}, {SATURATING} in flight: the maximum", (full,), limits)


def _shapes(custom: Custom) -> Iterator[Shape]:
    for length in custom.lengths or (512,):
        for batch in custom.batches or (1,):
            yield Shape(batch, length, length)


SUITES: dict[str, Callable[[Custom], Iterator[Case]]] = {
    "latency": latency,
    "polled": polled,
    "scoring": scoring,
    "throughput": throughput,
    "concurrency": concurrency,
    "open": open_loop,
    "mixed": mixed,
    "short": short,
    "custom": custom_loop,
    "trace": trace,
}
# What `all` runs: what needs no flags of its own.
ALL = ("latency", "scoring", "throughput", "concurrency", "open", "mixed")
