"""A job waits no longer than it may; what runs is left alone."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.errors import DeadlineExpired
from tests.fakes import FakeEngine
from tests.scheduling import KNOWN, assert_answers, batching, seqs, sequence, turns
from tests.virtual_loop import run_virtual


def test_a_deadline_is_kept_while_the_engine_is_busy() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=1.0)
        async with batching(engine, **KNOWN) as batcher:
            loop = asyncio.get_running_loop()
            calls = [asyncio.create_task(batcher.run([sequence(64)])) for _ in range(2)]
            await turns()
            began = loop.time()
            with pytest.raises(DeadlineExpired):
                await batcher.run([sequence(7)], deadline_s=0.050)
            assert loop.time() - began == pytest.approx(0.050, abs=0.001)
            await asyncio.gather(*calls)
            assert batcher.metrics.expired == 1
        assert sum(seqs(engine)) == 2  # the expired one never reached the engine

    run_virtual(scenario())


def test_deadlines_are_kept_in_any_order() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(service_s=1.0), **KNOWN) as batcher:
            loop = asyncio.get_running_loop()
            calls = [asyncio.create_task(batcher.run([sequence(64)])) for _ in range(2)]
            await turns()
            began, ended_s = loop.time(), {}

            async def late(deadline_s: float) -> None:
                with pytest.raises(DeadlineExpired):
                    await batcher.run([sequence(7)], deadline_s=deadline_s)
                ended_s[deadline_s] = loop.time() - began

            await asyncio.gather(*(late(deadline_s) for deadline_s in (0.3, 0.1, 0.2, 0.1, 0.4)))
            assert ended_s == {due_s: pytest.approx(due_s, abs=0.002) for due_s in (0.1, 0.2, 0.3, 0.4)}
            await asyncio.gather(*calls)

    run_virtual(scenario())


def test_a_deadline_does_not_end_what_already_runs() -> None:
    async def scenario() -> None:
        async with batching(FakeEngine(service_s=1.0)) as batcher:
            job = [sequence(7)]
            assert_answers(await batcher.run(job, deadline_s=0.050), job)

    run_virtual(scenario())
