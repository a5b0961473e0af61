"""Sequences that give several rows: each job gets its own, in order, however its sequences were batched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rose.batch import BatchResult, Float32, Int32, RaggedBatch, RaggedIds
from scheduler.admission import check_spans
from scheduler.errors import StepFailed
from scheduler.job import scatter
from scheduler.queue import SequenceQueue
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info, fake_vectors
from tests.scheduling import batching, job_of, sequence
from tests.virtual_loop import run_virtual

STEP_S = 0.01


def spans(*bounds: tuple[int, int]) -> Int32:
    return np.array(bounds, np.int32)


def expected(ids: Sequence[Int32], parts: Sequence[Int32 | None] | None = None) -> Float32:
    """Each sequence's rows as it gives them alone."""
    own = [None] * len(ids) if parts is None else parts
    return np.concatenate(
        [fake_vectors(RaggedBatch.pack([row], None, [part]), 8) for row, part in zip(ids, own, strict=True)]
    )


def test_jobs_with_and_without_spans_share_batches() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=fake_info(has_int8=True), service_s=STEP_S)
        jobs = [
            ([sequence(9), sequence(4, 50)], [spans((0, 3), (3, 9), (2, 2)), None]),
            ([sequence(5, 7)], None),
            ([sequence(6, 80)], [spans((0, 6), (1, 2))]),
        ]
        async with batching(engine) as batcher:
            results = await asyncio.gather(*(batcher.run(ids, spans=parts) for ids, parts in jobs))
        assert [(batch.num_seqs, batch.num_rows) for batch in engine.batches] == [(4, 7)]
        for (ids, parts), result in zip(jobs, results, strict=True):
            np.testing.assert_array_equal(result.vectors, expected(ids, parts))
            assert result.int8 is not None
            assert len(result.int8) == len(result.vectors)

    run_virtual(scenario())


def test_a_step_takes_no_more_rows_than_the_engine_does() -> None:
    async def scenario() -> None:
        engine = FakeEngine(info=fake_info(max_batch_seqs=8), service_s=STEP_S)
        ids = [sequence(10, 100 * number) for number in range(5)]
        parts = [spans(*[(0, 1)] * count) for count in (3, 4, 2, 8, 1)]
        async with batching(engine) as batcher:
            result = await batcher.run(ids, spans=parts)
        assert [batch.num_rows for batch in engine.batches] == [7, 2, 8, 1]
        np.testing.assert_array_equal(result.vectors, expected(ids, parts))

    run_virtual(scenario())


def test_halves_after_running_out_of_memory_keep_their_rows() -> None:
    async def scenario() -> None:
        engine = FakeEngine(service_s=STEP_S, oom_above_seqs=1)
        ids, parts = [sequence(6), sequence(7, 30)], [spans((0, 2), (2, 6)), spans((0, 7), (1, 3), (3, 3))]
        async with batching(engine) as batcher:
            result = await batcher.run(ids, spans=parts)
        assert [batch.num_rows for batch in engine.batches] == [5, 2, 3]
        np.testing.assert_array_equal(result.vectors, expected(ids, parts))

    run_virtual(scenario())


@pytest.mark.parametrize(
    "part",
    [
        spans((0, 5)),
        spans((3, 2)),
        spans((-1, 2)),
        np.zeros((0, 2), np.int32),
        np.zeros((9, 2), np.int32),
        np.zeros((1, 3), np.int32),
        np.zeros(2, np.int32),
    ],
)
def test_impossible_spans_are_refused(part: Int32) -> None:
    with pytest.raises(ValueError, match="spans"):
        check_spans(RaggedIds.of([sequence(4)]), [part], 8)


def test_rows_are_counted() -> None:
    async def scenario() -> None:
        job = job_of(
            asyncio.get_running_loop(), (4, 2, 1), spans=[spans((0, 4), (4, 4)), None, spans((0, 1))]
        )
        assert (job.num_rows, list(job.row_offsets)) == (4, [0, 2, 3, 4])

    run_virtual(scenario())


class FewRows(FakeEngine):
    """Gives a row a sequence, whatever spans there are."""

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        return super().step(replace(batch, spans=None))


def test_an_engine_that_gives_too_few_rows_fails_the_job() -> None:
    async def scenario() -> None:
        async with batching(FewRows()) as batcher:
            with pytest.raises(StepFailed, match="1 vectors for 2 sequences or spans"):
                await batcher.run([sequence(3)], spans=[spans((0, 1), (1, 3))])

    run_virtual(scenario())


def test_a_row_that_is_not_finite_fails_the_job_it_is_of() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        queue, two = SequenceQueue(), spans((0, 1), (1, 2))
        jobs = [job_of(loop, (4, 4), spans=[two, None]), job_of(loop, (4,), spans=[two])]
        for job in jobs:
            queue.append(job)
        batch = queue.take(100, 8, 0.0)
        scatter(batch, BatchResult(np.zeros((5, 8), np.float32), None, (2,)), 1.0)
        with pytest.raises(StepFailed, match=r"input\[2\]"):
            jobs[0].future.result()
        assert len(jobs[1].future.result().vectors) == 2

    run_virtual(scenario())
