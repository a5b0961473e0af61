"""Ways to do the same work, each replayed without a gap, so that the GPU stays at its power limit.

Work that draws more than the limit allows runs at a lower clock, by an amount that depends on the work: what
is fastest on a GPU that was idle need not be fastest under load. All that is here runs on the current stream,
which must not be the default one, as that cannot be captured.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

# Of each hold, replays at its start that do not count: the clock still follows what ran before.
_SKIPPED = 0.4
_ALONE_US = 3000
_NEAR, _MOST = 1.12, 12

# Around some replays, and how many.
_Events = tuple[torch.cuda.Event, torch.cuda.Event, int]


@dataclass(frozen=True)
class Contest:
    """Microseconds of each way alone and, of the nearest to the best, held; what each that failed said."""

    alone_us: Mapping[str, float]
    held_us: Mapping[str, float]
    failures: Mapping[str, str]


def contest(
    ways: Mapping[str, Callable[[], object]],
    kept: Collection[str],
    check: Callable[[str], object] = lambda name: None,
    hold_s: float = 0.12,
    rounds: int = 3,
) -> Contest:
    """Time what each way enqueues alone, then hold those near the best and, in any case, those of `kept`.

    check: called after a way's first run, with its name; one that it raises for has failed.
    hold_s, rounds: see held_us.

    Raises:
        RuntimeError: one that failed left CUDA unusable.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    alone: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, enqueue in ways.items():
        try:
            enqueue()
            check(name)
            graphs[name] = capture(enqueue)
            alone[name] = alone_us(graphs[name], 1.5 * min(alone.values(), default=math.inf))
        except Exception as error:  # whatever a library raises for what it does not take
            recover()
            failures[name] = str(error)[:200]
    chosen = {*nearest(alone, kept), *kept} & alone.keys()
    held = held_us({name: graphs[name] for name in chosen}, hold_s, rounds)
    return Contest(alone, held, failures)


def nearest(times: Mapping[str, float], kept: Collection[str]) -> list[str]:
    """The best of those that are not kept, up to _MOST of them that take at most _NEAR the first's time."""
    others = sorted(times.keys() - set(kept), key=lambda name: times[name])
    return [name for name in others[:_MOST] if times[name] <= _NEAR * times[others[0]]]


def recover() -> None:
    """After an error: raises if CUDA stays unusable. A launch that failed may be told of once more."""
    with suppress(RuntimeError):
        torch.cuda.synchronize()
    torch.ones(8, device="cuda").sum().item()


def capture(enqueue: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `enqueue` enqueues, which has run before: nothing may be compiled or loaded here.

    Not by torch.cuda.graph, which collects garbage and empties caches at every capture.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin()
    try:
        enqueue()
    finally:
        graph.capture_end()
    return graph


def alone_us(graph: torch.cuda.CUDAGraph, enough_us: float = math.inf) -> float:
    """Mean microseconds of a replay, of some for 3 ms; of one only if that takes more than enough_us."""
    graph.replay()  # the events' own launches hide behind it
    us = _us(*_replayed(graph, 1))
    if us > enough_us:
        return us
    graph.replay()
    return _us(*_replayed(graph, min(200, max(2, int(_ALONE_US / us)))))


def held_us(graphs: Mapping[str, torch.cuda.CUDAGraph], hold_s: float, rounds: int) -> dict[str, float]:
    """Mean microseconds of a replay of each graph, held for hold_s in each round, in random order.

    One more round, the first, only brings the GPU to its limit.
    """
    replays = {name: max(5, round(hold_s * 1e6 / alone_us(graph))) for name, graph in graphs.items()}
    holds: list[tuple[str, _Events]] = []
    for turn in range(rounds + 1):
        for name in random.sample(list(graphs), len(graphs)):
            events = _replayed(graphs[name], replays[name], int(_SKIPPED * replays[name]))
            if turn > 0:
                holds.append((name, events))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for name, events in holds:
        times[name].append(_us(*events))
    return {name: statistics.fmean(each) for name, each in times.items()}


def _replayed(graph: torch.cuda.CUDAGraph, replays: int, skipped: int = 0) -> _Events:
    """Enqueues the replays, the skipped first ones before the first event."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for index in range(replays):
        if index == skipped:
            start.record()
        graph.replay()
    end.record()
    return start, end, replays - skipped


def _us(start: torch.cuda.Event, end: torch.cuda.Event, replays: int) -> float:
    """Microseconds of one; waits."""
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1000 / replays
