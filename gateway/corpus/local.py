"""All shards in this process, on one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import uvloop

from gateway.corpus.commits import Outcome
from gateway.corpus.driver import Work
from gateway.corpus.options import LoadedModel
from gateway.corpus.plan import Shard
from gateway.corpus.signals import until_signal
from gateway.corpus.worker import Progress, ShardWorker, first_error

# While one shard is written the next one is read.
_SHARDS_AT_ONCE = 2


def run_here(work: Work, done: Callable[[Outcome], None], tell: Callable[[int, int], None]) -> None:
    """A Runner: see driver. On a signal shards that are under way are given up, and finished ones stay."""
    model = work.model.load()
    try:
        uvloop.run(_run(work, model, done, Progress(tell)))
    finally:
        model.engine.close()


async def _run(work: Work, model: LoadedModel, done: Callable[[Outcome], None], progress: Progress) -> None:
    worker = ShardWorker(work.options, model, work.id_type, work.run, progress)
    try:
        await worker.start()
        await until_signal(_all(iter(work.shards), worker, done))
    finally:
        await worker.close()


async def _all(shards: Iterator[Shard], worker: ShardWorker, done: Callable[[Outcome], None]) -> None:
    async def some() -> None:
        for shard in shards:
            done(await worker.run(shard))

    async with first_error(), asyncio.TaskGroup() as group:
        for _ in range(_SHARDS_AT_ONCE):
            group.create_task(some())
