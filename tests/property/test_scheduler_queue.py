"""The queue against a model that is obviously right: a list of rows, and a loop over it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.errors import DeadlineExpired
from scheduler.queue import SequenceQueue
from scheduler.sequence import Job, Sequence
from tests.scheduling import sequence


@dataclass
class Row:
    job: Job
    row: int
    tokens: int
    half: int = 0


@dataclass
class Taken:
    rows: list[Row]
    sequences: list[Sequence] = field(default_factory=list)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.queue = SequenceQueue()
        self.now_s = 0.0
        self.halves = 0
        self.jobs: list[Job] = []
        self.waiting: list[Row] = []
        self.taken: list[Taken] = []

    @rule(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
        deadline_s=st.one_of(st.just(inf), st.floats(0.0, 5.0)),
    )
    def arrive(self, lengths: list[int], deadline_s: float) -> None:
        job = Job(len(lengths), self.loop.create_future(), self.now_s, self.now_s + deadline_s)
        self.queue.append(job, [sequence(length) for length in lengths])
        self.jobs.append(job)
        self.waiting += [Row(job, row, length) for row, length in enumerate(lengths)]

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

    @rule(max_tokens=st.integers(1, 60), max_seqs=st.integers(1, 8))
    def take(self, max_tokens: int, max_seqs: int) -> None:
        expected: list[Row] = []
        for row in list(self.waiting):
            ended = row.job.done or self.now_s >= row.job.deadline_s
            tokens = sum(other.tokens for other in expected) + row.tokens
            if len(expected) == max_seqs:
                break
            if not ended and expected and (tokens > max_tokens or row.half != expected[0].half):
                break
            self.waiting.remove(row)
            if not ended:
                expected.append(row)
        sequences = self.queue.take(max_tokens, max_seqs, self.now_s)
        assert [(s.job, s.row) for s in sequences] == [(row.job, row.row) for row in expected]
        assert sum(s.num_tokens for s in sequences) <= max_tokens or len(sequences) == 1
        if expected:
            self.taken.append(Taken(expected, sequences))

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
        self.queue.retry_halves(batch.sequences)

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
