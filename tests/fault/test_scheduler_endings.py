"""Callers that leave, and a scheduler that ends: nobody is left waiting, nothing of theirs goes on."""

from __future__ import annotations

import asyncio
import logging

import pytest

from scheduler.errors import Draining, EngineDead
from tests.fakes import FakeEngine
from tests.scheduling import batching, call, outcomes, sequence, turns
from tests.virtual_loop import run_virtual

pytestmark = pytest.mark.timeout(20)

STEP_S = 0.010


@pytest.mark.parametrize("phase", ["queued", "launched", "completing"])
def test_cancellation_in_each_phase(phase: str) -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=None)
        async with batching(engine, min_budget_tokens=8, max_budget_tokens=8) as batcher:
            blockers = [call(batcher, 8), call(batcher, 8)] if phase == "queued" else []
            await turns()
            victim, neighbour = call(batcher, 4), call(batcher, 4, first=50)
            await turns()
            if phase == "completing":
                engine.finish()
            victim.cancel()
            await turns()
            for _ in range(3):
                if engine.running:
                    engine.finish()
                await turns()
            assert await outcomes(*blockers, neighbour) == ["result"] * (len(blockers) + 1)
            assert await outcomes(victim) == [asyncio.CancelledError]
            launched = sum(batch.num_seqs for batch in engine.batches)
            assert launched == (3 if phase == "queued" else 2)  # what was queued never ran
            metrics = batcher.metrics
            assert (metrics.cancelled, metrics.completed) == (1, len(blockers) + 1)
            assert (metrics.waiting_seqs, metrics.running_batches) == (0, 0)

    run_virtual(scenario())


def test_a_call_that_is_closed_instead_of_cancelled_is_dropped_too() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            abandoned = batcher.run([sequence(8)])
            abandoned.send(None)
            assert batcher.metrics.waiting_seqs == 1
            abandoned.close()
            assert batcher.metrics.waiting_seqs == 0
            assert await outcomes(call(batcher, 4)) == ["result"]
            assert [batch.num_tokens for batch in engine.batches] == [4]

    run_virtual(scenario())


def test_close_lets_accepted_work_finish_and_refuses_the_rest() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, min_budget_tokens=8, max_budget_tokens=8) as batcher:
            calls = [call(batcher, 8) for _ in range(6)]
            await turns()
            closing = asyncio.create_task(batcher.close(drain_s=5.0))
            await turns()
            with pytest.raises(Draining, match="shutting down"):
                await batcher.run([sequence(1)])
            assert set(await outcomes(*calls)) == {"result"}
            began = asyncio.get_running_loop().time()
            await closing
            assert asyncio.get_running_loop().time() - began < STEP_S  # nothing left to wait for
            assert not engine.closed

    run_virtual(scenario())


def test_close_while_the_engine_hangs_ends_everything_when_the_drain_is_over() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=None)
        async with batching(engine, min_budget_tokens=8, max_budget_tokens=8) as batcher:
            calls = [call(batcher, 8) for _ in range(6)]
            await turns()
            began = asyncio.get_running_loop().time()
            await batcher.close(drain_s=2.0)
            assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.01)
            assert set(await outcomes(*calls)) == {Draining}
            assert batcher.metrics.waiting_seqs == 0
            await batcher.close(drain_s=2.0)
            await asyncio.sleep(3600.0)
            assert batcher.healthy  # nobody watches a closed scheduler's steps

    run_virtual(scenario())


def test_cancelling_the_close_still_ends_everything() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(service_s=None)) as batcher:
            waiting = call(batcher, 8)
            await turns()
            closing = asyncio.create_task(batcher.close(drain_s=60.0))
            await turns()
            closing.cancel()
            assert await outcomes(waiting) == [Draining]

    run_virtual(scenario())


def test_nobody_waits_for_ever_when_the_collector_is_cancelled_from_outside() -> None:
    async def scenario() -> None:
        reasons: list[str] = []
        async with batching(FakeEngine(service_s=None), on_dead=reasons.append) as batcher:
            waiting = call(batcher, 8)
            await turns()
            for task in asyncio.all_tasks():
                if task.get_name() == "scheduler-collector":
                    task.cancel()
            assert await outcomes(waiting) == [EngineDead]
            assert reasons == ["the scheduler was stopped"]
            with pytest.raises(EngineDead):
                await batcher.run([sequence(1)])

    run_virtual(scenario())


@pytest.mark.parametrize("where", ["launch", "completion"])
def test_nobody_waits_for_ever_when_the_scheduler_itself_has_a_bug(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        reasons: list[str] = []
        async with batching(FakeEngine(service_s=STEP_S), on_dead=reasons.append) as batcher:
            calls = [call(batcher, 8), call(batcher, 8)]
            await turns()
            if where == "launch":
                batcher._pacer.next_batch = None  # type: ignore[method-assign, assignment]
            else:
                batcher._pacer.cost.observe = None  # type: ignore[method-assign, assignment]
            calls.append(call(batcher, 8))
            # Those whose rows were there before anything was learned of them have their answers.
            first = EngineDead if where == "launch" else "result"
            assert await outcomes(*calls) == [first, first, EngineDead]
            assert len(reasons) == 1 and reasons[0].startswith("the scheduler failed: ")

    with caplog.at_level(logging.ERROR):
        run_virtual(scenario())
    assert "the scheduler failed" in caplog.text
