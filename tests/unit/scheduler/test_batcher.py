from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import uvloop

from rose.batch import RaggedBatch, RaggedIds
from scheduler.batcher import Batcher
from scheduler.errors import QueueFull
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info, fake_vectors
from tests.programs import output_of
from tests.scheduling import KNOWN, STEP_S, assert_answers, batching, seqs, sequence, turns
from tests.virtual_loop import run_virtual


def test_arrivals_of_one_turn_share_a_batch_and_get_their_own_rows() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine) as batcher:
            jobs = [[sequence(n, first=100 * n + k) for k in range(n)] for n in range(1, 6)]
            results = await asyncio.gather(*(batcher.run(job) for job in jobs))
            assert seqs(engine) == [15]
            for job, result in zip(jobs, results, strict=True):
                assert_answers(result, job)
                assert result.int8 is None
                assert result.inference_ms == pytest.approx(STEP_S * 1e3, abs=0.2)
                assert result.queue_ms < 0.2

    run_virtual(scenario())


def test_a_batch_that_is_one_call_is_its_own_block_and_a_part_of_one_a_view() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=fake_info(max_batch_seqs=3))
        whole = RaggedIds.of([sequence(3), sequence(2), sequence(1)])
        large = RaggedIds.of([sequence(4, first=number) for number in range(5)])
        async with batching(engine) as batcher:
            assert_answers(await batcher.run(whole), list(whole))
            assert_answers(await batcher.run(large), list(large))
        assert seqs(engine) == [3, 3, 2]
        assert engine.batches[0].input_ids is whole.flat
        assert all(np.shares_memory(batch.input_ids, large.flat) for batch in engine.batches[1:])

    run_virtual(scenario())


def test_answers_come_before_what_their_step_teaches() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(service_s=STEP_S)) as batcher:
            await batcher.run([sequence(5)])
            assert (batcher.metrics.completed, batcher.metrics.step_ms.count) == (1, 0)
            await turns()
            assert batcher.metrics.step_ms.count == 1

    run_virtual(scenario())


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_runs_on_both_loops(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=0.002)
        batcher = Batcher(engine, SchedulerOptions(min_budget_tokens=64))
        await batcher.start()

        async def client(first: int) -> None:
            for step in range(10):
                job = [sequence(1 + (first + step) % 30, first=first)]
                assert_answers(await batcher.run(job, deadline_s=5.0), job)

        await asyncio.gather(*(client(first) for first in range(64)))
        await batcher.close(1.0)
        assert engine.most_in_flight == 2
        assert batcher.metrics.completed == 640

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(scenario(), 10.0))


def test_late_arrivals_join_the_batch_that_is_launched_just_in_time() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, **KNOWN) as batcher:
            started = asyncio.get_running_loop().time()
            calls = [asyncio.create_task(batcher.run([sequence(4)]))]
            for _ in range(4):
                await asyncio.sleep(0.002)
                calls.append(asyncio.create_task(batcher.run([sequence(4)])))
            await asyncio.gather(*calls)
            spent_s = asyncio.get_running_loop().time() - started
        assert seqs(engine) == [1, 4]
        assert spent_s == pytest.approx(2 * STEP_S, abs=0.0005)  # and the engine never ran dry

    run_virtual(scenario())


def test_a_full_batch_does_not_wait_for_the_end_of_the_running_one() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, **KNOWN) as batcher:
            first = asyncio.create_task(batcher.run([sequence(4)]))
            await asyncio.sleep(0.001)
            partial = asyncio.create_task(batcher.run([sequence(40)]))
            await asyncio.sleep(0.001)
            assert seqs(engine) == [1]
            full = asyncio.create_task(batcher.run([sequence(24)]))
            await turns()
            assert seqs(engine) == [1, 2]
            assert "2 running" not in repr(batcher) and "0 seqs" in repr(batcher)
            await asyncio.gather(first, partial, full)

    run_virtual(scenario())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_batches_in_flight_than_allowed(limit: int) -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, max_in_flight=limit, **KNOWN) as batcher:
            await asyncio.gather(*(batcher.run([sequence(32)] * 4) for _ in range(10)))
        assert engine.most_in_flight == limit

    run_virtual(scenario())


def test_a_job_of_many_batches_is_put_together() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=fake_info(has_int8=True, max_batch_seqs=8), service_s=STEP_S)
        async with batching(engine) as batcher:
            job = [sequence(1 + n % 17, first=n) for n in range(50)]
            result = await batcher.run(job)
            assert_answers(result, job)
            assert result.int8 is not None
            np.testing.assert_array_equal(result.int8, np.rint(np.tanh(result.vectors) * 127))
            assert sum(seqs(engine)) == 50
            assert max(seqs(engine)) <= 8
            assert result.inference_ms == pytest.approx(len(engine.batches) * STEP_S * 1e3, rel=0.05)

    run_virtual(scenario())


def test_token_types_stay_with_their_sequence() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with batching(engine) as batcher:
            pair, plain = sequence(6), sequence(4)
            types = np.array([0, 0, 0, 1, 1, 1], np.int32)
            with_types, without = await asyncio.gather(
                batcher.run([pair], [types]), batcher.run([plain, plain])
            )
            assert engine.batches[0].num_seqs == 3
            np.testing.assert_array_equal(
                with_types.vectors, fake_vectors(RaggedBatch.pack([pair], [types]), 8)
            )
            assert_answers(without, [plain, plain])

    run_virtual(scenario())


def test_impossible_sequences_are_refused_before_they_are_queued() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(info=fake_info(max_batch_tokens=100))) as batcher:
            with pytest.raises(ValueError, match="sequence has 101 tokens; a step takes 1 to 100"):
                await batcher.run([sequence(3), sequence(101)])
            with pytest.raises(ValueError, match="sequence has 0 tokens"):
                await batcher.run([sequence(0)])
            with pytest.raises(ValueError, match="at least one sequence"):
                await batcher.run([])
            with pytest.raises(ValueError, match="2 token types for a sequence of 3 tokens"):
                await batcher.run([sequence(3)], [sequence(2)])
            assert batcher.metrics.accepted == 0
            assert_answers(await batcher.run([sequence(100)]), [sequence(100)])

    run_virtual(scenario())


def test_a_full_queue_refuses_with_numbers() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=0.010)
        async with batching(engine, max_waiting_tokens=200, max_waiting_seqs=10, **KNOWN) as batcher:
            warm = [batcher.run([sequence(64)]) for _ in range(3)]
            await asyncio.gather(*warm)
            running = [asyncio.create_task(batcher.run([sequence(64)])) for _ in range(2)]
            await turns()
            waiting = [asyncio.create_task(batcher.run([sequence(60)])) for _ in range(3)]
            await turns()
            with pytest.raises(QueueFull) as refused:
                await batcher.run([sequence(21)])
            assert refused.value.backlog.waiting_tokens == 180
            assert refused.value.backlog.max_waiting_tokens == 200
            # 180 tokens wait, and the engine does 64 in 10 ms.
            assert refused.value.retry_after_s == pytest.approx(0.028, rel=0.1)
            assert "21 tokens in 1 sequences do not fit beside 180 waiting tokens" in str(refused.value)
            with pytest.raises(QueueFull):
                await batcher.run([sequence(1)] * 8)
            small = asyncio.create_task(batcher.run([sequence(20)]))
            await asyncio.gather(*running, *waiting, small)
            metrics = batcher.metrics
            assert (metrics.refused_full, metrics.refused_closed, metrics.accepted) == (2, 0, 9)

    run_virtual(scenario())


def test_a_job_above_the_limit_is_accepted_when_nothing_waits() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, max_waiting_tokens=100, max_waiting_seqs=5, **KNOWN) as batcher:
            job = [sequence(50, first=n) for n in range(20)]
            assert_answers(await batcher.run(job), job)

    run_virtual(scenario())


def test_cancelled_work_makes_room_at_once() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=None)
        async with batching(engine, max_waiting_tokens=128, **KNOWN) as batcher:
            blockers = [asyncio.create_task(batcher.run([sequence(64)])) for _ in range(2)]
            await turns()
            waiting = asyncio.create_task(batcher.run([sequence(100)]))
            await turns()
            waiting.cancel()
            await turns()
            assert batcher.metrics.waiting_tokens == 0
            successor = asyncio.create_task(batcher.run([sequence(100, first=5)]))
            await turns()
            engine.finish(2)
            await turns()
            engine.finish()
            assert_answers(await successor, [sequence(100, first=5)])
            await asyncio.gather(*blockers)

    run_virtual(scenario())


def test_captures_take_their_time_only_while_little_waits() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, **KNOWN) as batcher:
            await asyncio.gather(*(batcher.run([sequence(64)]) for _ in range(4)))
            await batcher.run([sequence(64)])
        assert engine.captures == [False, False, False, True, True]

    run_virtual(scenario())


def test_an_engine_without_capture_is_left_alone() -> None:
    class Plain:
        def __init__(self) -> None:
            fake = FakeEngine()
            self.info = fake.info
            self.step, self.stats, self.close = fake.step, fake.stats, fake.close

    async def scenario() -> None:
        engine = Plain()
        async with batching(engine) as batcher:
            assert_answers(await batcher.run([sequence(3)]), [sequence(3)])
        assert not hasattr(engine, "capture_freely")

    run_virtual(scenario())


def test_metrics_add_up() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, **KNOWN) as batcher:
            await asyncio.gather(*(batcher.run([sequence(10)] * 3) for _ in range(8)))
            metrics = batcher.metrics
            assert (metrics.accepted, metrics.completed) == (8, 8)
            assert (metrics.seqs, metrics.tokens) == (24, 240)
            assert metrics.batches == len(engine.batches) == metrics.step_ms.count
            assert metrics.tokens_per_batch.total == 240
            assert metrics.seqs_per_batch.total == 24
            assert metrics.step_ms.total == pytest.approx(metrics.batches * STEP_S * 1e3, rel=0.05)
            assert metrics.queue_ms.count == 8
            assert (metrics.running_batches, metrics.waiting_seqs, metrics.waiting_tokens) == (0, 0, 0)
            assert metrics.token_budget == 64

    run_virtual(scenario())


def test_nothing_of_a_job_is_left_when_it_has_ended() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine) as batcher:
            calls = [asyncio.create_task(batcher.run([sequence(8)], deadline_s=3600.0)) for _ in range(100)]
            await turns(1)
            for call in calls[:50]:
                call.cancel()
            await asyncio.wait(calls)
            assert not batcher._jobs
            timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
            assert sum(not timer.cancelled() for timer in timers) <= 2  # the watchdog's, the deadlines'

    run_virtual(scenario())


def test_a_step_that_ended_unseen_behind_another_teaches_nothing() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=None)
        loop, ticks = asyncio.get_running_loop(), itertools.count()
        batcher = Batcher(
            engine,
            SchedulerOptions(min_budget_tokens=8, max_budget_tokens=8),
            clock=lambda: loop.time() + next(ticks) * 1e-6,
        )
        await batcher.start()
        calls = [asyncio.create_task(batcher.run([sequence(8)])) for _ in range(2)]
        await asyncio.sleep(STEP_S)
        engine.finish(2)  # the loop stood still, so both are found done together
        await asyncio.gather(*calls)
        assert batcher.metrics.tokens_per_s == pytest.approx(8 / STEP_S, rel=0.02)
        await batcher.close(0.0)

    run_virtual(scenario())


@pytest.mark.interpreted
def test_polling_the_end_of_a_step_takes_at_most_the_timers_grain() -> None:
    """While something waits for a long step, the loop sleeps; it is not turned all the time."""

    async def scenario() -> int:
        engine = FakeEngine(service_s=STEP_S)
        async with batching(engine, **KNOWN) as batcher:
            launches = 0
            pace = batcher._pacer.launch_in_s

            def counted(*args: object) -> float:
                nonlocal launches
                launches += 1
                return pace(*args)  # type: ignore[arg-type]

            batcher._pacer.launch_in_s = counted  # type: ignore[method-assign, assignment]
            first = asyncio.create_task(batcher.run([sequence(4)]))
            await turns()
            await asyncio.gather(first, batcher.run([sequence(4)]))
        return launches

    assert run_virtual(scenario()) < 100  # 1 ms in turns of 20 us, and a few; 500 if it polled all 10 ms


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        SchedulerOptions(max_in_flight=0)
    with pytest.raises(ValueError, match="at least min_budget_tokens, 512"):
        SchedulerOptions(max_budget_tokens=100)
    with pytest.raises(ValueError, match="step_timeout_s"):
        SchedulerOptions(step_timeout_s=0.0)


def test_the_scheduler_never_imports_torch() -> None:
    code = "import sys, scheduler.batcher; sys.exit('torch' in sys.modules)"
    output_of("-c", code)
