from __future__ import annotations

import asyncio

import pytest

from scheduler.cost_model import CostPoint
from scheduler.inflight import InFlight, Step
from scheduler.options import SchedulerOptions
from scheduler.pacing import Pacer
from scheduler.queue import SequenceQueue
from tests.fakes import FakeLazyTensor, fake_info
from tests.scheduling import job_of

FLAT = tuple(CostPoint(tokens, tokens // 64, tokens * 0.01) for tokens in (256, 512, 1024))
OPTIONS = SchedulerOptions(
    min_budget_tokens=64, max_budget_tokens=256, cost_points=FLAT, launch_lead_s=0.001, launch_lead_share=0.0
)


def pacer(max_batch_tokens: int = 4096, max_batch_seqs: int = 64) -> Pacer:
    return Pacer(fake_info(max_batch_tokens=max_batch_tokens, max_batch_seqs=max_batch_seqs), OPTIONS)


def waiting(*lengths: int) -> SequenceQueue:
    return waiting_jobs(lengths) if lengths else SequenceQueue()


def waiting_jobs(*jobs: tuple[int, ...]) -> SequenceQueue:
    queue = SequenceQueue()
    loop = asyncio.new_event_loop()
    for lengths in jobs:
        queue.append(job_of(loop, lengths))
    loop.close()
    return queue


def running(*predicted_s: float, started_s: float = 10.0) -> InFlight:
    in_flight = InFlight()
    for seconds in predicted_s:
        in_flight.add(Step([], 0, 1, 0, FakeLazyTensor.__new__(FakeLazyTensor), started_s, seconds))
    return in_flight


def test_an_idle_engine_gets_what_there_is_at_once() -> None:
    assert pacer().launch_in_s(waiting(1), running(), now_s=10.0) == 0.0


def test_a_full_batch_is_launched_while_another_runs() -> None:
    assert pacer().launch_in_s(waiting(128, 128), running(5.0), now_s=10.0) == 0.0
    assert pacer(max_batch_seqs=2).launch_in_s(waiting(1, 1), running(5.0), now_s=10.0) == 0.0


def test_less_waits_until_shortly_before_the_engine_runs_dry() -> None:
    assert pacer().launch_in_s(waiting(64), running(0.020), now_s=10.0) == pytest.approx(0.019)
    assert pacer().launch_in_s(waiting(64), running(0.020, 0.030), now_s=10.0) == pytest.approx(0.049)
    assert pacer().launch_in_s(waiting(64), running(0.020), now_s=10.019) <= 0.0
    assert pacer().launch_in_s(waiting(64), running(0.020), now_s=99.0) <= 0.0


def test_an_unknown_step_holds_nothing_back() -> None:
    assert pacer().launch_in_s(waiting(64), running(0.0), now_s=10.0) <= 0.0


def test_the_lead_grows_with_the_step() -> None:
    options = SchedulerOptions(launch_lead_s=0.001, launch_lead_share=0.1, max_budget_tokens=512)
    wait_s = Pacer(fake_info(), options).launch_in_s(waiting(1), running(1.0), now_s=10.0)
    assert wait_s == pytest.approx(0.899)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(100, 100), (256, 256), (320, 320), (383, 383), (385, 193), (512, 256), (1500, 250), (2560, 256)],
)
def test_batches_are_evened_out(tokens: int, expected: int) -> None:
    assert pacer().budget(waiting(tokens)) == 256
    assert pacer().next_batch(waiting(tokens)).tokens == expected


def test_no_batch_is_larger_than_the_engine_takes() -> None:
    assert pacer(max_batch_tokens=300).next_batch(waiting(350)).tokens == 300
    assert pacer(max_batch_tokens=100).budget(waiting(350)) == 100


@pytest.mark.parametrize(
    ("jobs", "whole_job_tokens", "expected"),
    [
        ([(512,) * 5], 0, 256),
        ([(512,) * 5], 4096, 2560),  # all of it
        ([(100,), (512,) * 5], 4096, 266),  # the first one's answer does not wait for the large one's
        ([(512,) * 5, (100,)], 4096, 2560),  # nor does the large one's for whoever is behind it
        ([(128,) * 4, (512,) * 5], 4096, 512),
        ([(512,) * 5], 2048, 1280),  # in even parts
        ([(100,)], 4096, 100),
        ([(60,)] * 10, 4096, 300),  # small jobs are as many as pay
    ],
)
def test_a_large_job_is_one_step_where_the_engine_takes_it_whole(
    jobs: list[tuple[int, ...]], whole_job_tokens: int, expected: int
) -> None:
    info = fake_info(max_batch_tokens=4096, whole_job_tokens=whole_job_tokens)
    assert Pacer(info, OPTIONS).next_batch(waiting_jobs(*jobs)).tokens == expected


def test_the_next_step_begins_when_the_one_before_it_ends() -> None:
    in_flight = running(0.020, 0.030)
    assert [in_flight.head.alone, len(in_flight)] == [True, 2]
    in_flight.finish(10.5)
    assert (in_flight.head.started_s, in_flight.head.alone) == (10.5, False)
    assert in_flight.end_s == pytest.approx(10.53)
    in_flight.finish(11.0)
    assert not in_flight
