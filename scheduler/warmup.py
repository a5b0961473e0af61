"""The first, slow steps of an engine, run before a client waits for them; a device's are timed as well."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from rose.batch import Engine, EngineInfo, RaggedBatch
from rose.errors import StepError
from scheduler.batcher import Batcher
from scheduler.cost_model import CostPoint

log = logging.getLogger(__name__)

# Tokens of each sequence of the batches: they page in weights, code and thread pools.
_BATCHES = ((8,), (16, 32))
_TIMED_LENGTH = 512
# A shape's first step runs eagerly, and the second may be captured into a graph.
_COLD_STEPS = 2
# Two in flight, as under load. On an H200 a step of 512 tokens takes 1.5 ms, so that all take half a second.
_TIMED_STEPS = 6


async def warm_up(batcher: Batcher, info: EngineInfo) -> None:
    """Run a small batch and a larger one.

    Raises:
        SchedulerError: a step failed.
    """
    for lengths in _BATCHES:
        await batcher.run([_ids(length, info) for length in lengths][: info.max_batch_seqs])


async def measure(
    engine: Engine, max_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[CostPoint, ...]:
    """Times of steps of 1, 2, 4, ... sequences of 512 tokens, up to `max_tokens`, on an idle engine.

    clock: in seconds; not uvloop's own, which ticks in milliseconds.

    So the first budget is the right one. Learned from requests alone, it grows by doubling, and batches that
    it cut are the only ones whose times it then sees: on an H200 requests of 5 x 512 tokens went on in steps
    of 860. Ends early, with what was measured, where a step fails: memory may be short.

    Raises:
        rose.errors.EngineDeadError: the engine can run no further step.
    """
    points = []
    ids = _ids(_TIMED_LENGTH, engine.info)
    count = 1
    while (
        count * len(ids) <= min(max_tokens, engine.info.max_batch_tokens)
        and count <= engine.info.max_batch_seqs
    ):
        batch = RaggedBatch.pack([ids] * count)
        try:
            ms = await _step_ms(engine, batch, clock)
        except StepError as error:
            log.warning("no batch of %d tokens is timed: %s", batch.num_tokens, error)
            break
        points.append(CostPoint(batch.num_tokens, count, ms))
        count *= 2
    return tuple(points)


async def _step_ms(engine: Engine, batch: RaggedBatch, clock: Callable[[], float]) -> float:
    """Milliseconds of one of many steps of `batch`, of which the next is launched while one runs."""
    for _ in range(_COLD_STEPS):
        await engine.step(batch)
    started_s = clock()
    running = engine.step(batch)
    for _ in range(_TIMED_STEPS - 1):
        following = engine.step(batch)
        await running
        running = following
    await running
    return (clock() - started_s) * 1e3 / _TIMED_STEPS


def _ids(length: int, info: EngineInfo) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """i32[length], or as many as a sequence may have; ids 0, 1, 2, ..."""
    return np.arange(min(length, info.max_model_len, info.max_batch_tokens), dtype=np.int32) % info.vocab_size
