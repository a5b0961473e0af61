"""GPU time of enqueued work, measured inside a CUDA graph: launches cost the host nothing there."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def graph_us(
    enqueue: Callable[[], object], replays: int = 10, rounds: int = 3, budget_s: float = math.inf
) -> float:
    """Microseconds of one replay of what `enqueue` enqueues: the best of `rounds` means over `replays`.

    The best round, because what disturbs a GPU only ever makes it slower.
    budget_s: fewer replays, but one a round, where all would take longer than this.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        enqueue()  # compiles and loads kernels, which must not happen while capturing
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        enqueue()
    with torch.cuda.stream(stream):
        first_us = max(_round_us(graph, 1, stream), 1.0)
        replays = max(int(min(replays, budget_s * 1e6 / (first_us * rounds))), 1)
        times = [_round_us(graph, replays, stream) for _ in range(rounds)]
    return min(times)


def _round_us(graph: torch.cuda.CUDAGraph, replays: int, stream: torch.cuda.Stream) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record(stream)
    for _ in range(replays):
        graph.replay()
    end.record(stream)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1000 / replays
