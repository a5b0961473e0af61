"""The suites: which cases each one runs. The first four are the article's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from loadgen.plan import Case, Limits, Shape, Stream

SEQUENTIAL = Limits(requests=1000, min_s=3.0, max_s=30.0)
SCORING = Limits(requests=500, min_s=3.0, max_s=30.0)
THROUGHPUT = Limits(warmup_requests=16, requests=200, min_s=10.0, max_s=30.0)
CONCURRENT = Limits(warmup_requests=200, requests=2000, min_s=5.0, max_s=30.0)
QUICK = Limits(warmup_requests=5, warmup_s=0.3, max_warmup_s=2.0, requests=20, min_s=0.3, max_s=2.0)


@dataclass(frozen=True)
class Custom:
    """What the command line changes of a suite; None leaves it. lengths: tokens a sequence."""

    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    in_flight: tuple[int, ...] | None = None
    processes: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup_s: float | None = None
    timeout_s: float | None = None
    quick: bool = False

    def limits(self, default: Limits) -> Limits:
        """`default` with what was asked for."""
        limits = replace(QUICK, timeout_s=default.timeout_s) if self.quick else default
        if self.requests is not None:
            limits = replace(limits, requests=self.requests)
        if self.duration_s is not None:
            limits = replace(limits, min_s=min(limits.min_s, self.duration_s), max_s=self.duration_s)
        if self.warmup_s is not None:
            limits = replace(
                limits, warmup_s=self.warmup_s, max_warmup_s=max(limits.max_warmup_s, self.warmup_s)
            )
        if self.timeout_s is not None:
            limits = replace(limits, timeout_s=self.timeout_s)
        return limits


def latency(custom: Custom) -> Iterator[Case]:
    """One sequence at a time."""
    for length in custom.lengths or (128, 512, 4096):
        shape = Shape(1, length, length)
        yield Case("latency", str(shape), (Stream(shape),), custom.limits(SEQUENTIAL))


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
            in_flight = (custom.in_flight or (1,))[0]
            stream = Stream(shape, processes=processes, in_flight=in_flight)
            yield Case("throughput", f"{shape}, {processes} processes", (stream,), custom.limits(THROUGHPUT))


def concurrency(custom: Custom) -> Iterator[Case]:
    """Many clients with one sequence each; text, when there is a corpus."""
    levels = custom.in_flight or ((1, 2, 4) if custom.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256))
    for length in custom.lengths or (512,):
        for level in levels:
            shape = Shape(1, length, length)
            # One process drives 256 in flight at under 20 % of a core, and one process is one schedule.
            stream = Stream(shape, in_flight=level)
            yield Case("concurrency", f"{level} in flight × {length}", (stream,), custom.limits(CONCURRENT))


SUITES: dict[str, Callable[[Custom], Iterator[Case]]] = {
    "latency": latency,
    "scoring": scoring,
    "throughput": throughput,
    "concurrency": concurrency,
}
