"""The engine fails, hangs, dies or runs out of memory: who is hit, with what, and how soon."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from rose.errors import EngineDeadError, OutOfMemoryError, StepError
from scheduler.batcher import Batcher
from scheduler.errors import EngineDead, StepFailed, StepOutOfMemory
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info
from tests.scheduling import batching, call, outcomes, sequence, turns
from tests.virtual_loop import run_virtual

pytestmark = pytest.mark.timeout(20)

STEP_S = 0.010


@pytest.mark.parametrize("at_launch", [True, False])
def test_a_failed_step_hits_its_own_jobs_alone(at_launch: bool) -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, min_budget_tokens=10, max_budget_tokens=10) as batcher:
            error = StepError("a bad kernel")
            if at_launch:
                engine.raise_next(error)
            else:
                engine.fail_next(error)
            hit = [call(batcher, 5), call(batcher, 5)]
            spared = [call(batcher, 5), call(batcher, 5)]
            assert await outcomes(*hit) == [StepFailed, StepFailed]
            assert await outcomes(*spared) == ["result", "result"]
            assert batcher.healthy
            assert (batcher.metrics.failed, batcher.metrics.batches_failed) == (2, 1)

    run_virtual(scenario())


def test_a_job_that_loses_one_batch_gives_up_the_others() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, min_budget_tokens=10, max_budget_tokens=10) as batcher:
            engine.fail_next(StepError("a bad kernel"))
            large, small = call(batcher, *[10] * 8), call(batcher, 3)
            assert await outcomes(large, small) == [StepFailed, "result"]
            assert sum(batch.num_seqs for batch in engine.batches) == 3  # two in flight, and the small one

    run_virtual(scenario())


def test_each_job_gets_an_exception_of_its_own() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine) as batcher:
            engine.fail_next(StepError("a bad kernel"))
            failed = await asyncio.gather(call(batcher, 1), call(batcher, 1), return_exceptions=True)
            assert failed[0] is not failed[1]
            assert str(failed[0]) == "a bad kernel"

    run_virtual(scenario())


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("another")])
def test_a_bug_in_the_engine_fails_one_batch_and_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            engine.raise_next(error)
            assert await outcomes(call(batcher, 1)) == [StepFailed]
            assert await outcomes(call(batcher, 1)) == ["result"]

    with caplog.at_level(logging.ERROR):
        run_virtual(scenario())
    assert "the engine raised what it should not" in caplog.text


def test_a_result_of_the_wrong_size_reaches_nobody() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=None)
        async with batching(engine) as batcher:
            hit = call(batcher, 1, 2)
            await turns()
            lazy = engine.running.popleft()
            lazy.settle(FakeEngine._outcome(engine, type(lazy.batch).pack([sequence(1)])))
            assert await outcomes(hit) == [StepFailed]

    run_virtual(scenario())


@pytest.mark.parametrize("at_launch", [True, False])
def test_out_of_memory_runs_both_halves(at_launch: bool) -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine) as batcher:
            if at_launch:
                engine.raise_next(OutOfMemoryError("8 GiB short"))
            else:
                engine.fail_next(OutOfMemoryError("8 GiB short"))
            calls = [call(batcher, 3, 4, first=10 * n) for n in range(4)]
            assert await outcomes(*calls) == ["result"] * 4
            sizes = [batch.num_seqs for batch in engine.batches]
            assert sizes == ([4, 4] if at_launch else [8, 4, 4])
            assert batcher.metrics.batches_halved == 1

    run_virtual(scenario())


def test_a_half_that_does_not_fit_either_fails_and_the_other_does_not() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine) as batcher:
            for outcome in (OutOfMemoryError("whole"), OutOfMemoryError("half"), None):
                engine.fail_next(outcome)
            calls = [call(batcher, 3) for _ in range(4)]
            assert await outcomes(*calls) == [StepOutOfMemory, StepOutOfMemory, "result", "result"]
            assert len(engine.batches) == 3  # retried once each, not more
            assert batcher.healthy

    run_virtual(scenario())


def test_a_sequence_alone_is_not_tried_again() -> None:
    async def scenario() -> None:
        engine = FakeEngine(oom_above_seqs=0)
        async with batching(engine) as batcher:
            assert await outcomes(call(batcher, 3)) == [StepOutOfMemory]
            assert len(engine.batches) == 1

    run_virtual(scenario())


def test_halves_run_alone_and_before_what_came_later() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=fake_info(max_batch_seqs=4), service_s=STEP_S, oom_above_seqs=2)
        async with batching(engine) as batcher:
            calls = [call(batcher, 3, first=n) for n in range(9)]
            assert await outcomes(*calls) == ["result"] * 9
            order = [[int(batch.input_ids[at]) for at in batch.cu_seqlens[:-1]] for batch in engine.batches]
            assert order == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1], [2, 3], [4, 5], [6, 7], [8]]
            assert engine.in_flight_at_launch == [0, 1, 0, 0, 0, 0, 1]

    run_virtual(scenario())


@pytest.mark.timed
def test_a_dead_engine_ends_64_in_flight_and_refuses_the_next_soon() -> None:
    """On the real clock and loop: 64 typed errors in under 250 ms, the next refusal in under 10 ms."""

    async def scenario() -> None:
        engine = FakeEngine(service_s=None)
        reasons: list[str] = []
        batcher = Batcher(engine, SchedulerOptions(), on_dead=reasons.append)
        await batcher.start()
        calls = [call(batcher, 8, first=n) for n in range(64)]
        await turns()
        assert batcher.metrics.running_seqs == 64
        waiting = [call(batcher, 8, first=n) for n in range(8)]
        await turns(2)
        began = time.perf_counter()
        engine.die("a sticky CUDA error")
        assert set(await outcomes(*calls, *waiting)) == {EngineDead}
        assert time.perf_counter() - began < 0.250
        assert not batcher.healthy
        assert reasons == ["a sticky CUDA error"]
        began = time.perf_counter()
        with pytest.raises(EngineDead, match="a sticky CUDA error"):
            await batcher.run([sequence(1)])
        assert time.perf_counter() - began < 0.010
        assert batcher.metrics.refused_closed == 1
        assert "dead" in repr(batcher)
        await batcher.close(1.0)

    asyncio.run(scenario())


def test_death_at_launch_ends_what_is_in_flight_too() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=None)
        reasons: list[str] = []
        async with batching(engine, on_dead=reasons.append, step_timeout_s=5.0) as batcher:
            first = call(batcher, 8)
            await turns()
            engine.raise_next(EngineDeadError("gone"))
            second = call(batcher, 8)
            assert await outcomes(first, second) == [EngineDead, EngineDead]
            assert reasons == ["gone"]
            await asyncio.sleep(10.0)  # the watchdog has no second death to tell of
            assert reasons == ["gone"]
            assert "scheduler-collector" not in {task.get_name() for task in asyncio.all_tasks()}
            engine.finish()  # too late, and to nobody
            await turns()

    run_virtual(scenario())


@pytest.mark.parametrize("steps", [1, 2])
def test_a_hung_step_is_the_engines_death(steps: int) -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        engine.hang_next(steps)
        reasons: list[str] = []
        options: dict[str, Any] = {"min_budget_tokens": 8, "max_budget_tokens": 8, "step_timeout_s": 30.0}
        async with batching(engine, on_dead=reasons.append, **options) as batcher:
            calls = [call(batcher, 8) for _ in range(6)]
            began = asyncio.get_running_loop().time()
            assert set(await outcomes(*calls)) == {EngineDead}
            assert asyncio.get_running_loop().time() - began == pytest.approx(30.0, abs=0.01)
            assert len(reasons) == 1 and "step_timeout_s=30" in reasons[0]
            with pytest.raises(EngineDead):
                await batcher.run([sequence(1)])

    run_virtual(scenario())


def test_the_watchdog_times_each_step_and_not_the_busy_hour() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=0.9)
        options: dict[str, Any] = {"min_budget_tokens": 8, "max_budget_tokens": 8, "step_timeout_s": 1.0}
        async with batching(engine, **options) as batcher:
            assert set(await outcomes(*(call(batcher, 8) for _ in range(20)))) == {"result"}
            engine.hang_next()
            began = asyncio.get_running_loop().time()
            assert await outcomes(call(batcher, 8)) == [EngineDead]
            assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.01)

    run_virtual(scenario())


def test_a_process_that_stood_still_does_not_blame_the_engine() -> None:
    """The step is done when the late watchdog looks; the step behind it is still watched."""

    class Clock:
        ahead_s = 0.0

        def __call__(self) -> float:
            return asyncio.get_running_loop().time() + self.ahead_s

    async def scenario() -> None:
        clock = Clock()
        engine = FakeEngine(service_s=None)
        options = SchedulerOptions(min_budget_tokens=8, max_budget_tokens=8, step_timeout_s=1.0)
        batcher = Batcher(engine, options, clock=clock)
        await batcher.start()
        first, second = call(batcher, 8), call(batcher, 8)
        await turns()
        clock.ahead_s = 5.0
        engine.finish()
        batcher._watch()  # the timer, long overdue, fires before the collector is woken
        assert await outcomes(first) == ["result"]
        assert batcher.healthy
        assert await outcomes(second) == [EngineDead]
        await batcher.close(0.0)

    run_virtual(scenario())


def test_a_malformed_sequence_is_refused_and_fails_no_batch() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(), min_budget_tokens=4, max_budget_tokens=4) as batcher:
            beside = call(batcher, 1)
            with pytest.raises(ValueError, match=r"shape \[3, 1\]"):
                await batcher.run([sequence(3).reshape(3, 1)])
            assert await outcomes(beside, call(batcher, 4)) == ["result", "result"]
            with pytest.raises(ValueError, match="dimension"):
                await batcher.run([sequence(4).reshape(4, 1), sequence(1)])
            assert batcher.healthy

    run_virtual(scenario())
