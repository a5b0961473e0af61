"""What clients see of an engine that fails, hangs or dies: through the real gateway, in real time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from rose.batch import BatchResult, RaggedBatch
from rose.errors import EngineError, StepError
from scheduler.options import SchedulerOptions
from tests.attempts import best_of, in_time
from tests.fakes import FakeEngine, fake_info
from tests.http.served import Reply, Served, serving, until

pytestmark = pytest.mark.timeout(30)

IN_FLIGHT = 64
# Two sequences of 4 tokens a batch, so that a fault of one batch can spare the next.
PAIRS = SchedulerOptions(min_budget_tokens=8, max_budget_tokens=8)


async def ask(server: Served, count: int, tokens: int = 4) -> list[asyncio.Task[Reply]]:
    """Requests of one sequence each, all accepted, with rising ids."""
    accepted = server.batcher.metrics.accepted + count
    asked = [asyncio.create_task(server.embed({"input": [10 * n] * tokens})) for n in range(count)]
    await until(lambda: server.batcher.metrics.accepted == accepted)
    return asked


@best_of(3)
async def test_the_engine_s_death_with_64_in_flight_is_told_at_once() -> None:
    """64 typed answers within 250 ms, the next refusal within 10 ms, /ready 503 within 1 s."""
    engine = FakeEngine(service_s=None)
    async with serving(engine=engine) as server:
        await server.send("GET", "/ready")
        asked = await ask(server, IN_FLIGHT)
        await until(lambda: server.batcher.metrics.running_batches > 0)
        began_s = time.perf_counter()
        engine.die("the device fell off the bus")
        replies = await asyncio.gather(*asked)
        ended_s = time.perf_counter()
        ready = await server.send("GET", "/ready")
        ready_s = time.perf_counter()
        refusals_s = []
        for _ in range(5):  # the shortest: others may have the cores for some of the time
            started_s = time.perf_counter()
            assert (await server.embed({"input": [1]})).status == 503
            refusals_s.append(time.perf_counter() - started_s)
    for reply in replies:
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert "the device fell off the bus" in reply.error["message"]
        assert reply.headers["Connection"] == "close"
    assert ready.status == 503
    in_time(ended_s - began_s < 0.250, ended_s - began_s)
    in_time(min(refusals_s) < 0.010, refusals_s)
    in_time(ready_s - began_s < 1.0, ready_s - began_s)


@best_of(3)
async def test_a_step_that_never_ends_fails_all_and_the_probes() -> None:
    engine = FakeEngine()
    engine.hang_next()
    options = replace(PAIRS, step_timeout_s=0.5)
    async with serving(engine=engine, scheduling=options) as server:
        began_s = time.perf_counter()
        replies = await asyncio.gather(*await ask(server, IN_FLIGHT))
        taken_s = time.perf_counter() - began_s
        assert {(reply.status, reply.error["code"]) for reply in replies} == {(503, "unavailable")}
        assert "has not finished in step_timeout_s=0.5" in replies[0].error["message"]
        assert (await server.send("GET", "/ready")).status == 503
        assert (await server.send("GET", "/health")).status == 503
    assert taken_s > 0.4
    in_time(taken_s < 2.0, taken_s)


class Scripted(FakeEngine):
    """Ends its steps when told to, the first of two sequences with `ending`. spoilt: the batch of that one.

    One of one sequence may come before: where tasks begin at once (Python 3.12) the first request goes alone.
    """

    def __init__(self, ending: BatchResult | EngineError) -> None:
        super().__init__(service_s=None)
        self._ending = ending
        self.spoilt: RaggedBatch | None = None

    def _outcome(self, batch: RaggedBatch) -> BatchResult | EngineError:
        if self.spoilt is not None or batch.num_seqs != 2:
            return super()._outcome(batch)
        self.spoilt = batch
        return self._ending


BAD_ENDINGS: dict[str, BatchResult | EngineError] = {
    "failed": StepError("a bad kernel"),
    "not finite": BatchResult(np.full((2, 8), np.nan, np.float32), non_finite=(0, 1)),
    "too few rows": BatchResult(np.zeros((1, 8), np.float32)),
    "too narrow": BatchResult(np.zeros((2, 7), np.float32)),
    "flat": BatchResult(np.zeros(2, np.float32)),
    "wrong int8": BatchResult(np.zeros((2, 8), np.float32), np.zeros((2, 9), np.int8)),
}


@pytest.mark.parametrize("ending", BAD_ENDINGS.values(), ids=BAD_ENDINGS)
async def test_a_bad_step_fails_its_own_requests_and_no_others(ending: BatchResult | EngineError) -> None:
    engine = Scripted(ending)
    async with serving(engine=engine, scheduling=PAIRS) as server:
        asked = await ask(server, 6)
        while not all(request.done() for request in asked):
            if engine.running:
                engine.finish()
            await asyncio.sleep(0.001)
        assert engine.spoilt is not None
        hit = set(engine.spoilt.input_ids.tolist())
        for number, request in enumerate(asked):
            reply = await request
            if 10 * number in hit:
                assert (reply.status, reply.error["code"]) == (500, "inference_failed")
            else:
                assert reply.status == 200
        assert (await server.send("GET", "/ready")).status == 200


async def test_a_step_that_raises_fails_its_own_requests_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(service_s=0.02)
    async with serving(engine=engine, scheduling=PAIRS) as server:
        engine.raise_next(RuntimeError("a bug in the engine"))
        statuses = [reply.status for reply in await asyncio.gather(*await ask(server, 6))]
        assert statuses.count(500) in (1, 2)  # one batch, of one request or two
        assert statuses.count(200) == 6 - statuses.count(500)
        assert "the engine raised what it should not" in caplog.text
        await server.assert_works()


async def test_too_little_memory_halves_once_and_then_is_503_and_the_process_lives() -> None:
    info = fake_info(max_batch_seqs=8)
    engine = FakeEngine(info=info, service_s=0.01, oom_above_seqs=3)
    async with serving(engine=engine) as server:
        reply = await server.embed({"input": [[n] * 3 for n in range(6)]})
        assert reply.status == 200  # 6 do not fit, 3 do
        assert [batch.num_seqs for batch in engine.batches] == [6, 3, 3]
        engine.batches.clear()
        reply = await server.embed({"input": [[n] * 3 for n in range(8)]})
        assert (reply.status, reply.error["code"]) == (503, "out_of_memory")  # neither 8 nor 4 fit
        assert [batch.num_seqs for batch in engine.batches][:2] == [8, 4]
        assert max(batch.num_seqs for batch in engine.batches) == 8
        assert server.batcher.healthy
        await server.assert_works()
