"""The queue against a model that is obviously right: a list of rows, and a loop over it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.batch import TokenOutput
from scheduler.errors import DeadlineExpired
from scheduler.job import Job, Run
from scheduler.queue import SequenceQueue
from tests.scheduling import job_of

HIDDEN: frozenset[TokenOutput] = frozenset({"hidden"})
MOST_TOKENS = 30  # of a batch that gives an output of each


@dataclass
class Row:
    """A sequence. row: its first one's place in the result; rows: how many it has."""

    job: Job
    row: int
    tokens: int
    rows: int = 1
    half: int = 0


@dataclass
class Taken:
    rows: list[Row]
    runs: list[Run]


def rows_of(run: Run) -> list[tuple[Job, int, int]]:
    """Of each sequence its job, its first row and its tokens."""
    places = run.job.row_offsets[run.first : run.last]
    return [(run.job, row, len(ids)) for row, ids in zip(places, run.sequences, strict=True)]


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.queue = SequenceQueue(lambda _: MOST_TOKENS)
        self.now_s = 0.0
        self.halves = 0
        self.jobs: list[Job] = []
        self.waiting: list[Row] = []
        self.taken: list[Taken] = []

    @rule(
        parts=st.lists(
            st.tuples(st.integers(1, 20), st.sampled_from([0, 0, 0, 1, 3])), min_size=1, max_size=6
        ),
        deadline_s=st.one_of(st.just(inf), st.floats(0.0, 5.0)),
        kinds=st.sampled_from([frozenset[TokenOutput](), frozenset[TokenOutput](), HIDDEN]),
    )
    def arrive(self, parts: list[tuple[int, int]], deadline_s: float, kinds: frozenset[TokenOutput]) -> None:
        lengths, spans = [], []
        for length, count in parts:
            lengths.append(length)
            spans.append(np.zeros((count, 2), np.int32) if count else None)
        own = spans if any(count for _, count in parts) else None
        ends_s = self.now_s + deadline_s
        job = job_of(self.loop, lengths, self.now_s, deadline_s=ends_s, spans=own, token_outputs=kinds)
        self.queue.append(job)
        self.jobs.append(job)
        row = 0
        for length, count in parts:
            self.waiting.append(Row(job, row, length, count or 1))
            row += count or 1
        assert job.num_rows == row

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0), told=st.booleans())
    def cancel(self, which: int, told: bool) -> None:
        job = self.jobs[which % len(self.jobs)]
        job.future.cancel()
        if told:
            self.queue.drop(job)

    @rule(seconds=st.floats(0.0, 2.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        max_tokens=st.integers(1, 60),
        max_rows=st.integers(1, 8),
        apart=st.one_of(st.none(), st.integers(1, 60)),
    )
    def take(self, max_tokens: int, max_rows: int, apart: int | None) -> None:
        before, expected = list(self.waiting), list[Row]()
        for row in before:
            if sum(other.rows for other in expected) >= max_rows:
                break
            if not row.job.done and self.now_s < row.job.deadline_s:
                if not self._joins(row, expected, (max_tokens, max_rows), apart):
                    break
                expected.append(row)
            self.waiting.remove(row)
        runs = self.queue.take(max_tokens, max_rows, self.now_s, apart)
        taken = [row for run in runs for row in rows_of(run)]
        assert taken == [(row.job, row.row, row.tokens) for row in expected]
        assert [sum(run.num_seqs for run in runs), sum(run.num_rows for run in runs)] == [
            len(expected),
            sum(row.rows for row in expected),
        ]
        assert len({run.job for run in runs}) == len(runs)
        if expected:
            self.taken.append(Taken(expected, runs))

    def _joins(self, row: Row, batch: list[Row], limits: tuple[int, int], apart: int | None) -> bool:
        if not batch:
            return True
        together = [*batch, row]
        max_tokens, max_rows = limits
        if any(other.job.token_outputs for other in together):
            max_tokens = min(max_tokens, MOST_TOKENS)
        if sum(other.tokens for other in together) > max_tokens or row.half != batch[0].half:
            return False
        if sum(other.rows for other in together) > max_rows:
            return False
        waits = sum(other.tokens for other in self.waiting if other.job is row.job)
        return apart is None or row.job is batch[-1].job or waits <= apart

    @precondition(lambda self: self.taken)
    @rule()
    def run_out_of_memory(self) -> None:
        batch = self.taken.pop(0)
        live = [row for row in batch.rows if not row.job.done]
        for half in (live[: len(live) // 2], live[len(live) // 2 :]):
            self.halves += 1
            for row in half:
                row.half = self.halves
        first_fresh = next((at for at, row in enumerate(self.waiting) if not row.half), len(self.waiting))
        self.waiting[first_fresh:first_fresh] = live
        self.queue.retry_halves(batch.runs)

    @invariant()
    def counts_are_those_of_the_live_rows(self) -> None:
        for job in self.jobs:
            if job.done:
                self.queue.drop(job)
        live = [row for row in self.waiting if not row.job.done]
        assert self.queue.num_seqs == len(self.queue) == len(live)
        assert self.queue.num_tokens == sum(row.tokens for row in live)
        for job in self.jobs:
            mine = [row.tokens for row in live if row.job is job]
            assert (job.waiting_seqs, job.waiting_tokens) == (len(mine), sum(mine))

    def teardown(self) -> None:
        for job in self.jobs:
            if job.done and not job.future.cancelled():
                assert isinstance(job.future.exception(), DeadlineExpired)
                assert self.now_s >= job.deadline_s
        self.loop.close()


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
