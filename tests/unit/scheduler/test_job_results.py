from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from rose.batch import BatchResult, Float32
from scheduler.errors import StepFailed
from scheduler.job import Job, JobResult, Run, scatter
from tests.scheduling import job_of


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def rows_of(job: Job, first: int = 0, last: int | None = None) -> list[Run]:
    return [Run(job, first, job.num_rows if last is None else last)]


def vectors(count: int, first: int = 0) -> Float32:
    return (np.arange(first, first + count, dtype=np.float32)[:, None] + np.zeros(4, np.float32)).copy()


def result_of(job: Job) -> JobResult:
    return job.future.result()


def test_one_batch_gives_views(loop: asyncio.AbstractEventLoop) -> None:
    jobs = [job_of(loop, [1] * count, 1.0, launched_s=1.5) for count in (1, 3, 2)]
    values = vectors(6)
    int8 = values.astype(np.int8)
    squares = np.arange(10, 16, dtype=np.float32)
    runs = [row for job in jobs for row in rows_of(job)]
    scatter(runs, BatchResult(values, int8, squares=squares), 2.0)
    assert [result_of(job).vectors[:, 0].tolist() for job in jobs] == [[0], [1, 2, 3], [4, 5]]
    own = [result_of(job).squares for job in jobs]
    assert [None if of_job is None else of_job.tolist() for of_job in own] == [[10], [11, 12, 13], [14, 15]]
    for job in jobs:
        result = result_of(job)
        assert np.shares_memory(result.vectors, values)
        assert result.int8 is not None and np.shares_memory(result.int8, int8)
        assert (result.queue_ms, result.inference_ms) == (500.0, 500.0)


def test_several_batches_are_copied_once_into_the_jobs_own_array(loop: asyncio.AbstractEventLoop) -> None:
    job = job_of(loop, [1] * 5)
    first, second = vectors(2), vectors(3, first=2)
    known = np.ones(2, np.float32)
    scatter(rows_of(job, 0, 2), BatchResult(first, first.astype(np.int8), squares=known), 1.0)
    assert not job.done
    first[:] = -1.0  # the slot is used again
    scatter(rows_of(job, 2), BatchResult(second, second.astype(np.int8)), 2.0)
    result = result_of(job)
    assert result.vectors[:, 3].tolist() == [0, 1, 2, 3, 4]
    assert result.squares is None  # each step knew those of its own rows
    assert not np.shares_memory(result.vectors, second)
    assert result.int8 is not None and result.int8[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert result.int8.dtype == np.int8


def test_batches_may_come_back_in_any_order(loop: asyncio.AbstractEventLoop) -> None:
    job = job_of(loop, [1] * 4)
    scatter(rows_of(job, 2), BatchResult(vectors(2, first=2)), 1.0)
    scatter(rows_of(job, 0, 2), BatchResult(vectors(2)), 2.0)
    assert result_of(job).vectors[:, 0].tolist() == [0, 1, 2, 3]
    assert result_of(job).int8 is None


def test_the_first_outcome_stays(loop: asyncio.AbstractEventLoop) -> None:
    failed, cancelled, done = (job_of(loop, [1] * 1) for _ in range(3))
    failed.fail(StepFailed("first"))
    cancelled.future.cancel()
    scatter(rows_of(done), BatchResult(vectors(1)), 1.0)
    for job in (failed, cancelled, done):
        scatter(rows_of(job), BatchResult(vectors(1, first=7)), 2.0)
        job.fail(StepFailed("second"))
        job.expire()
    with pytest.raises(StepFailed, match="first"):
        failed.future.result()
    assert cancelled.future.cancelled()
    assert result_of(done).vectors[0, 0] == 0
    assert "done" in repr(done)


def test_a_row_that_is_not_finite_fails_its_job_and_no_other(loop: asyncio.AbstractEventLoop) -> None:
    jobs = [job_of(loop, [1] * count, 1.0, launched_s=1.5) for count in (1, 3, 2)]
    rows = [row for job in jobs for row in rows_of(job)]
    scatter(rows, BatchResult(vectors(6), None, non_finite=(2, 3)), 2.0)
    with pytest.raises(StepFailed, match=r"NaN or infinity for input\[1\]"):
        result_of(jobs[1])
    assert [result_of(job).vectors[:, 0].tolist() for job in (jobs[0], jobs[2])] == [[0], [4, 5]]


def test_a_job_over_two_batches_fails_with_its_first_bad_row(loop: asyncio.AbstractEventLoop) -> None:
    job = job_of(loop, [1] * 3)
    scatter(rows_of(job, 0, 2), BatchResult(vectors(2), None), 1.0)
    scatter(rows_of(job, 2), BatchResult(vectors(1), None, non_finite=(0,)), 2.0)
    with pytest.raises(StepFailed, match=r"input\[2\]"):
        result_of(job)
