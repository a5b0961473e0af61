"""Requests larger than any batch of many requests: one step where the engine takes them whole."""

from __future__ import annotations

import asyncio

import pytest

from rose.batch import RaggedBatch
from rose.errors import OutOfMemoryError
from scheduler.errors import DeadlineExpired, StepOutOfMemory
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info
from tests.scheduling import KNOWN, STEP_S, assert_answers, batching, seqs, sequence, turns
from tests.virtual_loop import run_virtual


def test_a_large_job_that_does_not_fit_is_halved_until_it_does() -> None:
    class Short(FakeEngine):
        def step(self, batch: RaggedBatch) -> FakeLazyTensor:
            if batch.num_tokens > 300:
                self.fail_next(OutOfMemoryError("out of memory"))
            return super().step(batch)

    async def scenario() -> None:
        info = fake_info(max_batch_tokens=4096, whole_job_tokens=4096)
        engine = Short(info=info, service_s=STEP_S)
        async with batching(engine, min_budget_tokens=64, max_budget_tokens=256) as batcher:
            job = [sequence(64, first=n) for n in range(20)]
            assert_answers(await batcher.run(job), job)
            assert batcher.metrics.batches_halved == 7
            with pytest.raises(StepOutOfMemory):
                await batcher.run([sequence(512)])

    run_virtual(scenario())


def test_a_large_job_behind_one_that_has_ended_is_whole() -> None:
    async def scenario() -> None:
        info = fake_info(max_batch_tokens=4096, whole_job_tokens=4096)
        engine = FakeEngine(info=info, service_s=STEP_S)
        known = {**KNOWN, "max_budget_tokens": 512, "min_budget_tokens": 512}
        async with batching(engine, **known) as batcher:
            running = [asyncio.ensure_future(batcher.run([sequence(600)])) for _ in range(2)]
            await turns()
            left, late = (
                asyncio.ensure_future(batcher.run([sequence(64)] * 9, deadline_s=deadline_s))
                for deadline_s in (None, 0.5 * STEP_S)
            )
            whole = asyncio.ensure_future(batcher.run([sequence(64)] * 20))
            await turns()
            left.cancel()
            await asyncio.gather(*running, whole)
            with pytest.raises(DeadlineExpired):
                await late
        assert seqs(engine) == [1, 1, 20]

    run_virtual(scenario())


def test_who_is_before_a_large_job_does_not_wait_for_its_beginning() -> None:
    async def scenario() -> None:
        info = fake_info(max_batch_tokens=2048, whole_job_tokens=2048)
        engine = FakeEngine(info=info, service_s=lambda batch: batch.num_tokens * 1e-5)
        known = {**KNOWN, "max_budget_tokens": 512, "min_budget_tokens": 512}
        async with batching(engine, **known) as batcher:
            running = asyncio.ensure_future(batcher.run([sequence(64)]))
            await turns()
            jobs = [[sequence(8)] * 2, [sequence(64)] * 20, [sequence(8)], [sequence(64)] * 8]
            results = await asyncio.gather(*(batcher.run(job) for job in jobs), running)
        for job, result in zip(jobs, results, strict=False):
            assert_answers(result, job)
        assert seqs(engine) == [1, 2, 20, 9]  # what is no larger than a batch begins behind others

    run_virtual(scenario())


def test_a_large_job_is_one_step_and_delays_nobody() -> None:
    """Who is behind it waits for all of it either way, who is before it for none of it."""

    async def answered_s(whole_job_tokens: int) -> tuple[list[float], list[int]]:
        info = fake_info(max_batch_tokens=2048, whole_job_tokens=whole_job_tokens)
        engine = FakeEngine(info=info, service_s=lambda batch: batch.num_tokens * 1e-5)
        clock = asyncio.get_running_loop().time
        async with batching(engine, **KNOWN) as batcher:

            async def timed(*lengths: int) -> float:
                started_s, job = clock(), [sequence(length) for length in lengths]
                assert_answers(await batcher.run(job), job)
                return clock() - started_s

            times = await asyncio.gather(timed(64), timed(*[64] * 20), timed(64))
        return list(times), seqs(engine)

    async def scenario() -> None:
        parted_s, in_parts = await answered_s(0)
        whole_s, at_once = await answered_s(2048)
        assert (in_parts, at_once) == ([1] * 22, [1, 20, 1])
        assert whole_s == pytest.approx(parted_s, rel=0.02)

    run_virtual(scenario())
