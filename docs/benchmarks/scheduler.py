"""What the scheduler costs: many callers, one core, and an engine that does nothing.

    python docs/benchmarks/scheduler.py [--loop asyncio] [--profile]

closed: callers that never pause; wall time over requests, with the core saturated by the caller's task,
`Batcher.run`, batching, completion and scatter. open: arrivals paced in time; the process's CPU time over
requests, less what the pacing and the callers' tasks cost without a scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.batch import BatchResult, EngineInfo, RaggedBatch
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions

TOKENS = 128


@dataclass(slots=True)
class DoneTensor:
    """A result that is there already, or one loop turn later."""

    value: BatchResult
    done: bool

    def result(self) -> BatchResult:
        """The zeros."""
        return self.value

    def __await__(self) -> Generator[object, None, BatchResult]:
        """Suspend for one turn, as the real one does while it polls."""
        yield None
        self.done = True
        return self.value


class NullEngine:
    """Answers zeros after `turns` (0 or 1) turns of the loop."""

    def __init__(self, turns: int) -> None:
        self.info = EngineInfo(
            "null", "null", "float32", "cpu", 1024, 30_000, 8192, 16_384, 256, "mean", True
        )
        self._zeros = np.zeros((self.info.max_batch_seqs, self.info.dimensions), np.float32)
        self._turns = turns

    def step(self, batch: RaggedBatch) -> DoneTensor:
        """Zeros f32[B, 1024]."""
        return DoneTensor(BatchResult(self._zeros[: batch.num_seqs]), done=self._turns == 0)

    def stats(self) -> Mapping[str, object]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Nothing to free."""


async def closed_loop(clients: int, requests: int, turns: int) -> tuple[float, float]:
    """Seconds a request, and sequences a batch, with `clients` callers that never pause."""
    batcher = Batcher(NullEngine(turns), SchedulerOptions())
    await batcher.start()
    ids = np.ones(TOKENS, np.int32)

    async def client() -> None:
        for _ in range(requests // clients):
            await batcher.run([ids])

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    spent_s = time.perf_counter() - begin
    metrics = batcher.metrics
    await batcher.close(1.0)
    return spent_s / metrics.completed, metrics.seqs / metrics.batches


async def paced(call: Callable[[], Coroutine[object, object, object]], rate: int, total: int) -> float:
    """CPU seconds a call when `total` calls start evenly, `rate` a second, each in a task of its own."""
    tasks: set[asyncio.Task[object]] = set()
    begin, cpu_s = time.perf_counter(), time.process_time()
    sent = 0
    while sent < total:
        due = min(total, int((time.perf_counter() - begin) * rate))
        for _ in range(due - sent):
            task = asyncio.ensure_future(call())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        sent = due
        await asyncio.sleep(0.001)
    if tasks:
        await asyncio.wait(tasks)
    return (time.process_time() - cpu_s) / total


async def open_loop(rate: int, total: int) -> tuple[float, float]:
    """CPU seconds a request, less those of empty calls; and sequences a batch."""
    batcher = Batcher(NullEngine(1), SchedulerOptions())
    await batcher.start()
    ids = np.ones(TOKENS, np.int32)
    empty_s = await paced(lambda: asyncio.sleep(0), rate, total)
    spent_s = await paced(lambda: batcher.run([ids]), rate, total)
    metrics = batcher.metrics
    await batcher.close(1.0)
    return spent_s - empty_s, metrics.seqs / metrics.batches


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--requests", type=int, default=40_000, help="requests a case")
    parser.add_argument("--profile", type=int, metavar="CLIENTS", help="profile so many callers instead")
    options = parser.parse_args()
    factory = uvloop.new_event_loop if options.loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(runner.run, closed_loop(options.profile, options.requests, 1))
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            return
        for clients, turns in ((1, 0), (1, 1), (4, 1), (64, 1), (256, 1)):
            each_s, seqs = runner.run(closed_loop(clients, options.requests, turns))
            print(
                f"{options.loop} closed clients={clients} turns={turns}: {1 / each_s:.0f} requests/s,"
                f" {each_s * 1e6:.1f} us/request, {seqs:.1f} seqs/batch"
            )
        each_s, seqs = runner.run(open_loop(4000, options.requests // 4))
        print(
            f"{options.loop} open rate=4000/s: {each_s * 1e6:.1f} us of CPU a request, {seqs:.1f} seqs/batch"
        )


if __name__ == "__main__":
    main()
