"""Requests leave nothing behind that only the cycle collector could free, refused ones neither.

An error's traceback holds the frames it passed, and those the body. In a cycle that would stay until
the collector runs, which is seldom.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gateway.errors import ApiError
from rose.batch import BatchResult
from rose.errors import EngineError, StepError
from scheduler.errors import SchedulerError
from scheduler.job import Job
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, FakeLazyTensor
from tests.http.served import Served, serving, until


def found() -> list[object]:
    """Errors, jobs and steps that were made since the collector was last told to forget."""
    kinds = ApiError | EngineError | SchedulerError | Job | FakeLazyTensor
    return [it for it in gc.get_objects() if isinstance(it, kinds)]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[object]]]:
    """Gives those of this test that are still there; the collector is off meanwhile."""
    log = logging.getLogger("scheduler.batcher")
    monkeypatch.setattr(log, "disabled", True)  # pytest keeps what is logged
    gc.collect()
    gc.freeze()  # what is found from here on is of this test
    gc.disable()
    yield found
    gc.enable()


BODIES = {
    "served": {"input": [[5, 6], [7]]},
    "not decoded": {"input": {"a": 1}},
    "no such id": {"input": [99_999_999]},
    "too long": {"input": [1] * 600},
    "no such model": {"input": [1], "model": "other"},
    "Perplexity's words": {"input": [1], "encoding_format": "base64_int8", "dimensions": 10**9},
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/contextualizedembeddings", "/embed", "/v2/embed"])
async def test_an_answer_leaves_nothing_behind(
    left: Callable[[], list[object]], server: Served, path: str, name: str
) -> None:
    for close in (False, True):  # by our way through HTTP, and by aiohttp's
        await server.embed(BODIES[name], path=path, headers={"Connection": "close"} if close else {})
    await until(lambda: not left())


async def test_full_late_and_cancelled_requests_leave_nothing_behind(
    left: Callable[[], list[object]],
) -> None:
    engine = FakeEngine(service_s=None)
    options = SchedulerOptions(max_in_flight=1, max_waiting_seqs=1)
    async with serving(engine=engine, scheduling=options) as server:
        served = asyncio.create_task(server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        waiting = asyncio.create_task(server.embed({"input": [2]}))
        await until(lambda: server.batcher.metrics.waiting_seqs == 1)
        assert (await server.embed({"input": [3]})).status == 429
        waiting.cancel()
        await until(lambda: server.batcher.metrics.cancelled == 1)
        late = await server.embed({"input": [4]}, headers={"x-request-timeout-ms": "40"})
        assert late.status == 504
        engine.finish()
        assert (await served).status == 200
        leaving = asyncio.create_task(server.embed({"input": [5]}))
        await until(lambda: len(engine.running) == 1)
        leaving.cancel()
        await until(lambda: server.batcher.metrics.cancelled == 2)
        engine.finish()
        await until(lambda: not left())


def _raises(engine: FakeEngine) -> None:
    engine.raise_next(StepError("a bad launch"))


def _raises_what_it_should_not(engine: FakeEngine) -> None:
    engine.raise_next(RuntimeError("a bug in the engine"))


def _fails(engine: FakeEngine) -> None:
    engine.fail_next(StepError("a bad kernel"))


def _has_no_memory(engine: FakeEngine) -> None:
    engine.oom_above_seqs = 0


def _is_of_another_width(engine: FakeEngine) -> None:
    engine.answer_next(BatchResult(np.zeros((2, 7), np.float32)))


@pytest.mark.parametrize(
    "fault",
    [_raises, _raises_what_it_should_not, _fails, _has_no_memory, _is_of_another_width],
    ids=lambda fault: fault.__name__,
)
async def test_a_failed_step_leaves_nothing_behind(
    left: Callable[[], list[object]], fault: Callable[[FakeEngine], None]
) -> None:
    """Neither one that failed before it was awaited nor one that did meanwhile."""
    for service_s in (0.0, 0.005):
        engine = FakeEngine(service_s=service_s)
        async with serving(engine=engine) as server:
            fault(engine)
            assert (await server.embed({"input": [[1], [2]]})).status in (500, 503)
            await until(lambda: not left())
