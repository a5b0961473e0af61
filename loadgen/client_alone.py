"""What the client costs by itself: the same load against a server that only answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from loadgen import echo
from loadgen.conductor import Setting, run_case
from loadgen.plan import Case, Limits, Shape, Source, Stream, Target
from loadgen.processes import Clients
from loadgen.summary import Latency, StreamSummary, summarise

OVERHEAD = Case(
    "overhead",
    "1×512",
    (Stream(Shape(1, 512, 512)),),
    Limits(warmup_requests=200, warmup_s=0.3, max_warmup_s=1.0, requests=1000, min_s=0.5, max_s=2.0),
)
CEILING = Limits(warmup_requests=1, warmup_s=0.3, max_warmup_s=0.6, requests=10**9, min_s=1.0, max_s=1.0)


def overhead(clients: Clients, target: Target, source: Source) -> Latency:
    """One sequence of 512 ids at a time, in the wire format of `target`."""
    return _measure(clients, OVERHEAD, target, source).service


def ceilings(clients: Clients, cases: Iterable[Case], target: Target, source: Source) -> dict[str, float]:
    """Embeddings a second that client and echo server reach together, for the cases that want to know."""
    wanted = {f"{case.suite} {case.name}": case for case in cases if case.alone}
    return {
        name: _measure(clients, replace(case, limits=CEILING), target, source).embeddings_per_s
        for name, case in wanted.items()
    }


def _measure(clients: Clients, case: Case, target: Target, source: Source) -> StreamSummary:
    with echo.running() as port:
        stub = Target("echo", "127.0.0.1", port, target.api, "echo")
        # Random ids in any case: the echo server counts no tokens of text.
        setting = Setting(Source(source.vocab_size, source.seed))
        (measured,) = run_case(clients, case, stub, setting, lambda _: None)
    return summarise(measured)
