"""What tests of the scheduler share: a started Batcher on the running (virtual) loop, sequences for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rose.batch import Engine, Int32, RaggedIds
from scheduler.batcher import Batcher
from scheduler.cost_model import CostPoint
from scheduler.job import Job, JobResult
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_vector

STEP_S = 0.010
# Every step takes 10 ms, whatever it holds; the budget stays at 64 tokens.
KNOWN: dict[str, Any] = {
    "cost_points": tuple(CostPoint(2**power, 1, STEP_S * 1e3) for power in range(11)),
    "min_budget_tokens": 64,
    "max_budget_tokens": 64,
}


def seqs(engine: FakeEngine) -> list[int]:
    return [batch.num_seqs for batch in engine.batches]


@asynccontextmanager
async def batching(
    engine: Engine, on_dead: Callable[[str], None] | None = None, **options: Any
) -> AsyncIterator[Batcher]:
    """A started Batcher, closed without a drain at the end."""
    clock = asyncio.get_running_loop().time
    batcher = Batcher(engine, SchedulerOptions(**options), on_dead=on_dead, clock=clock)
    await batcher.start()
    try:
        yield batcher
    finally:
        await batcher.close(0.0)


def sequence(num_tokens: int, first: int = 0) -> Int32:
    """i32[num_tokens], rising from `first`."""
    return np.arange(first, first + num_tokens, dtype=np.int32)


def job_of(
    loop: asyncio.AbstractEventLoop,
    lengths: Iterable[int],
    arrived_s: float = 0.0,
    launched_s: float | None = None,
    **settings: Any,
) -> Job:
    """A job of sequences of these lengths."""
    job = Job(
        RaggedIds.of([sequence(length) for length in lengths]), loop.create_future(), arrived_s, **settings
    )
    job.launched_s = launched_s
    return job


def assert_answers(result: JobResult, sequences: list[Int32]) -> None:
    """Each row is the vector of its own sequence."""
    assert len(result.vectors) == len(sequences)
    for vector, ids in zip(result.vectors, sequences, strict=True):
        np.testing.assert_array_equal(vector, fake_vector(ids, len(vector)))


async def turns(count: int = 5) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def outcomes(*calls: asyncio.Task[object]) -> list[object]:
    """The type of each call's error, or "result"."""
    ended = await asyncio.gather(*calls, return_exceptions=True)
    return [type(outcome) if isinstance(outcome, BaseException) else "result" for outcome in ended]


def call(batcher: Batcher, *lengths: int, first: int = 0) -> asyncio.Task[object]:
    job = [sequence(length, first=first) for length in lengths]

    async def checked() -> None:
        assert_answers(await batcher.run(job), job)

    return asyncio.create_task(checked())
