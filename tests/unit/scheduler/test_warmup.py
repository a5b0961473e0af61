from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rose.batch import EngineInfo, RaggedBatch
from rose.errors import EngineDeadError
from scheduler.cost_model import CostPoint
from scheduler.errors import SchedulerError
from scheduler.options import SchedulerOptions
from scheduler.pacing import Pacer
from scheduler.queue import SequenceQueue
from scheduler.warmup import measure, warm_up
from tests.fakes import FakeEngine, fake_info
from tests.scheduling import batching, job_of
from tests.virtual_loop import run_virtual

# What an H200 takes for a 0.6B model, in ms: no batch of under 4096 tokens is within 2 % of the best rate.
H200_MS = {512: 1.5, 1024: 2.34, 2048: 4.1, 4096: 7.75, 8192: 15.0, 16384: 29.8}


def info_of(model_len: int = 512, tokens: int = 16_384, seqs: int = 64) -> EngineInfo:
    return replace(fake_info(max_batch_tokens=tokens, max_batch_seqs=seqs), max_model_len=model_len)


def engine_of(info: EngineInfo) -> FakeEngine:
    return FakeEngine(info=info, service_s=lambda batch: H200_MS[batch.num_tokens] / 1e3)


def measured(engine: FakeEngine, max_tokens: int = 16_384) -> tuple[CostPoint, ...]:
    async def timed() -> tuple[CostPoint, ...]:
        return await measure(engine, max_tokens, asyncio.get_running_loop().time)

    return run_virtual(timed())


def test_steps_are_timed_by_doublings_two_in_flight() -> None:
    engine = engine_of(info_of())
    points = measured(engine)
    assert [(point.tokens, point.seqs) for point in points] == [(512 << n, 1 << n) for n in range(6)]
    for point in points:
        assert point.ms == pytest.approx(H200_MS[point.tokens], rel=0.02)
    assert engine.most_in_flight == 2


def test_what_was_measured_makes_the_first_budget() -> None:
    info = info_of()
    points = measured(engine_of(info))
    pacer = Pacer(info, SchedulerOptions(cost_points=points))
    assert pacer.cost.budget(25 * 512, 25) == 8192
    assert (
        Pacer(info, SchedulerOptions(cost_points=points, throughput_tolerance=0.05)).cost.budget(2560, 5)
        == 4096
    )


@pytest.mark.parametrize(("lengths", "expected"), [([512] * 5, 2560), ([512] * 18, 9216), ([512] * 25, 6400)])
def test_a_queue_is_cut_into_the_batches_that_end_first(lengths: list[int], expected: int) -> None:
    pacer = Pacer(info_of(), SchedulerOptions(cost_points=measured(engine_of(info_of()))))
    queue = SequenceQueue()
    loop = asyncio.new_event_loop()
    queue.append(job_of(loop, lengths))
    loop.close()
    assert pacer.next_batch(queue).tokens == expected


@pytest.mark.parametrize(("tokens", "seqs", "model_len"), [(1024, 64, 512), (16_384, 2, 512), (700, 8, 300)])
def test_no_limit_is_passed(tokens: int, seqs: int, model_len: int) -> None:
    info = info_of(model_len, tokens, seqs)
    engine = FakeEngine(info=info, service_s=0.001)
    points = measured(engine)
    assert [point.seqs for point in points] == [1, 2]
    assert all(within(batch, info) for batch in engine.batches)


def within(batch: RaggedBatch, info: EngineInfo) -> bool:
    return batch.num_tokens <= info.max_batch_tokens and batch.num_seqs <= info.max_batch_seqs


def test_no_more_is_timed_than_a_batch_may_have() -> None:
    info = info_of()
    assert [point.tokens for point in measured(engine_of(info), max_tokens=2048)] == [512, 1024, 2048]


def test_short_memory_ends_the_measuring_and_not_the_start() -> None:
    info = info_of()
    engine = FakeEngine(info=info, service_s=0.001, oom_above_seqs=4)
    assert [point.seqs for point in measured(engine)] == [1, 2, 4]


def test_a_dead_engine_is_told() -> None:
    engine = FakeEngine(service_s=0.001)
    engine.die()
    with pytest.raises(EngineDeadError):
        measured(engine)


def test_a_first_step_that_hangs_ends_the_warm_up_when_its_time_is_over() -> None:
    async def scenario() -> float:
        engine = FakeEngine(service_s=0.001)
        engine.hang_next()
        async with batching(engine, step_timeout_s=30.0) as batcher:
            with pytest.raises(SchedulerError, match="step_timeout_s=30"):
                await warm_up(batcher, engine.info)
            return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(30.0, abs=0.1)
