from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from math import inf

import numpy as np
import pytest

from scheduler.errors import DeadlineExpired, StepFailed
from scheduler.job import Job, Run
from scheduler.queue import SequenceQueue
from tests.scheduling import job_of


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Bench:
    """A queue and a way to put jobs into it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue = SequenceQueue()
        self._loop = loop

    def add(self, *lengths: int, deadline_s: float = inf) -> Job:
        job = job_of(self._loop, lengths, deadline_s=deadline_s)
        self.queue.append(job)
        return job

    def take(self, max_tokens: int = 100, max_seqs: int = 100, now_s: float = 0.0) -> list[int]:
        return lengths(self.queue.take(max_tokens, max_seqs, now_s))


def lengths(batch: list[Run]) -> list[int]:
    return [length for run in batch for length in run.sequences.lengths]


@pytest.fixture
def bench(loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(loop)


def test_first_come_first_served_within_the_token_budget(bench: Bench) -> None:
    bench.add(40, 40)
    bench.add(30)
    bench.add(5)  # would still fit beside 40 + 40, but must not overtake 30
    assert bench.take() == [40, 40]
    assert bench.take() == [30, 5]
    assert bench.take() == []


def test_the_sequence_limit_ends_a_batch(bench: Bench) -> None:
    bench.add(1, 1, 1, 1, 1)
    assert bench.take(max_seqs=3) == [1, 1, 1]
    assert bench.take(max_seqs=3) == [1, 1]


@pytest.mark.parametrize("others_first", [True, False])
def test_a_sequence_longer_than_the_budget_runs_alone(bench: Bench, others_first: bool) -> None:
    if others_first:
        bench.add(3)
    bench.add(500)
    bench.add(4)
    expected = [[3]] if others_first else []
    expected += [[500], [4]]
    assert [bench.take() for _ in expected] == expected


def test_counts_follow_every_change(bench: Bench) -> None:
    first = bench.add(10, 20)
    bench.add(30)
    assert (bench.queue.num_seqs, bench.queue.num_tokens) == (3, 60)
    assert repr(bench.queue) == "<SequenceQueue 3 seqs, 60 tokens waiting>"
    bench.take(max_tokens=10)
    assert (bench.queue.num_seqs, bench.queue.num_tokens) == (2, 50)
    first.future.cancel()
    bench.queue.drop(first)
    bench.queue.drop(first)
    assert (bench.queue.num_seqs, bench.queue.num_tokens) == (1, 30)
    assert repr(bench.queue) == "<SequenceQueue 1 seqs, 30 tokens waiting>"
    assert bench.take() == [30]
    assert len(bench.queue) == 0


def test_ended_jobs_are_dropped_at_pop_even_if_nobody_said_so(bench: Bench) -> None:
    gone = bench.add(10, 10)
    bench.add(7)
    gone.future.cancel()
    assert bench.take() == [7]
    assert (bench.queue.num_seqs, bench.queue.num_tokens) == (0, 0)


def test_a_deadline_ends_the_job_at_pop(bench: Bench) -> None:
    late = bench.add(10, 10, deadline_s=2.0)
    bench.add(7, deadline_s=3.0)
    assert bench.take(max_tokens=10, now_s=1.9) == [10]
    assert bench.take(now_s=2.0) == [7]
    with pytest.raises(DeadlineExpired, match="not started within 2 s"):
        late.future.result()


def test_nothing_is_kept_of_dropped_jobs(bench: Bench, loop: asyncio.AbstractEventLoop) -> None:
    kept = bench.add(1)
    halved = bench.add(2, 3)
    bench.queue.retry_halves(bench.queue.take(6, 3, 0.0))
    gone = [halved, bench.add(4, 5), bench.add(6)]
    for job in gone:
        job.fail(StepFailed("gone"))
        job.future.exception()
        bench.queue.drop(job)
    taken = bench.queue.take(6, 3, 0.0)  # halves are forgotten when they come first
    assert [run.job for run in taken] == [kept] and bench.queue.drop_ended(0.0) is None
    found = [held for held in gc.get_objects() if isinstance(held, Run)]
    assert {run.job for run in found} == {kept}
    assert bench.take() == []


def test_a_job_that_fits_in_part_is_split_and_keeps_its_place(bench: Bench) -> None:
    bench.add(10)
    job = bench.add(20, 30, 40, 50)
    bench.add(5)
    first, second = bench.queue.take(65, 100, 0.0), bench.queue.take(90, 100, 0.0)
    assert [(run.first, run.last, run.num_seqs, run.num_tokens) for run in first] == [
        (0, 1, 1, 10),
        (0, 2, 2, 50),
    ]
    assert [(run.first, run.last, run.first_row, run.first_token) for run in second] == [(2, 4, 2, 50)]
    assert (job.waiting_seqs, job.waiting_tokens) == (0, 0)
    assert bench.take() == [5]


def test_a_part_is_no_copy(bench: Bench) -> None:
    job = bench.add(3, 4, 5)
    [part] = bench.queue.take(7, 100, 0.0)
    [rest] = bench.queue.take(7, 100, 0.0)
    assert [ids.tolist() for ids in part.sequences] == [[0, 1, 2], [0, 1, 2, 3]]
    assert all(np.shares_memory(run.sequences.flat, job.sequences.flat) for run in (part, rest))
    bench.queue.append(whole := job_of(job.future.get_loop(), (1, 2)))
    assert bench.queue.take(3, 2, 0.0)[0].sequences is whole.sequences


def test_halves_run_again_first_apart_and_in_order(bench: Bench) -> None:
    bench.add(1, 2, 3, 4, 5)
    bench.add(6)
    batch = bench.queue.take(15, 100, 0.0)
    assert not bench.queue.retrying
    bench.queue.retry_halves(batch)
    assert bench.queue.retrying
    assert (bench.queue.num_seqs, bench.queue.num_tokens) == (6, 21)
    assert [bench.take() for _ in range(3)] == [[1, 2], [3, 4, 5], [6]]
    assert not bench.queue.retrying


def test_a_job_alone_is_taken_whole_if_it_fits(bench: Bench) -> None:
    job = bench.add(10, 20, 30)
    assert bench.take(max_tokens=59) == [10, 20]
    assert bench.take(max_tokens=30, max_seqs=3) == [30]
    assert (bench.queue.num_seqs, bench.queue.num_tokens, job.waiting_seqs) == (0, 0, 0)
    bench.add(1, 2, 3)
    bench.queue.retry_halves(bench.queue.take(6, 3, 0.0))
    assert [bench.take(), bench.take(), bench.take()] == [[1], [2, 3], []]
    bench.add(4, 5).future.cancel()
    assert bench.take() == []


def test_halves_are_cut_between_sequences_whatever_job_they_are_of(bench: Bench) -> None:
    first, second, third = bench.add(1), bench.add(2, 3, 4, 5), bench.add(6, 7)
    bench.add(8)
    bench.queue.retry_halves(bench.queue.take(28, 100, 0.0))
    halves = [bench.queue.take(100, 100, 0.0) for _ in range(3)]
    assert [[(run.job, run.first, run.last) for run in half] for half in halves[:2]] == [
        [(first, 0, 1), (second, 0, 2)],
        [(second, 2, 4), (third, 0, 2)],
    ]
    assert lengths(halves[2]) == [8]
    assert halves[0][0].retry != halves[1][0].retry


def test_half_a_batch_may_be_taken_in_parts_and_halved_again(bench: Bench) -> None:
    bench.add(1, 2, 3)
    bench.add(4, 5, 6)
    bench.queue.retry_halves(bench.queue.take(100, 100, 0.0))
    assert bench.take(max_tokens=3) == [1, 2]
    bench.queue.retry_halves(bench.queue.take(100, 100, 0.0))
    assert [bench.take() for _ in range(3)] == [[4, 5, 6], [3], []]


def test_halves_of_a_later_batch_wait_behind_those_of_an_earlier_one(bench: Bench) -> None:
    bench.add(1, 2, 3, 4)
    first, second = (bench.queue.take(100, 2, 0.0) for _ in range(2))
    bench.queue.retry_halves(first)
    bench.queue.retry_halves(second)
    assert [bench.take() for _ in range(4)] == [[1], [2], [3], [4]]


def test_cancelled_rows_do_not_run_again(bench: Bench) -> None:
    gone = bench.add(1, 2)
    bench.add(3)
    batch = bench.queue.take(100, 100, 0.0)
    gone.future.cancel()
    bench.queue.retry_halves(batch)
    assert bench.queue.num_seqs == 1
    assert [bench.take(), bench.take()] == [[3], []]
