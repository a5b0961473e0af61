"""One call's sequences, runs of them, and how a step's rows get back to it. Knows no queue, no engine."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from rose.batch import NO_TOKEN_OUTPUTS, BatchResult, Float32, Int8, Int32, RaggedIds, TokenOutput
from scheduler.errors import DeadlineExpired, SchedulerError, StepFailed
from scheduler.metrics import SchedulerMetrics


@dataclass(init=False, slots=True, eq=False)
class JobResult:
    """What `Batcher.run` returns, a row a sequence or span, in the job's order.

    vectors: f32[n, D]. int8: i8[n, D] or None. Views of the step's output when one step held the whole job.
    queue_ms: from acceptance to the launch of the first sequence.
    inference_ms: from there to the last sequence's result.
    tokens: f32[T, W] of each kind that was asked for, all sequences' tokens end to end.
    batch_seqs: sequences of the batch that the first of them was in, those of other jobs among them.
    squares: as of BatchResult, where one step held the whole job and knew them.
    Never changes. Its `__init__` is written out for the reason that RaggedBatch's is.
    """

    vectors: Float32
    int8: Int8 | None
    queue_ms: float
    inference_ms: float
    tokens: Mapping[TokenOutput, Float32]
    batch_seqs: int
    squares: Float32 | None

    def __init__(
        self,
        vectors: Float32,
        int8: Int8 | None,
        queue_ms: float,
        inference_ms: float,
        tokens: Mapping[TokenOutput, Float32] | None = None,
        batch_seqs: int = 0,
        squares: Float32 | None = None,
    ) -> None:
        self.vectors = vectors
        self.int8 = int8
        self.queue_ms = queue_ms
        self.inference_ms = inference_ms
        self.tokens = {} if tokens is None else tokens
        self.batch_seqs = batch_seqs
        self.squares = squares


class Job:
    """The sequences of one call, and the future of who waits for them. Ends once: result, error or cancelled.

    sequences: i32[n] each. arrived_s, deadline_s: on the batcher's clock; the latter is infinite for none.
    token_type_ids: a row as long as its sequence, or None for zeros. spans: i32[k, 2], k >= 1, the parts of a
    sequence whose means are wanted, or None for all of it. token_outputs: what is wanted of each token.
    special: it has any of these.
    num_rows: of its result. row_offsets: where each sequence's rows begin in it, from 0, and num_rows.
    launched_s: when its first sequence was launched, in a batch of batch_seqs.
    waiting_seqs, waiting_tokens: its part of the queue's counts; kept by RunCounts alone.
    """

    __slots__ = (
        "_delivered", "_int8", "_tokens", "_vectors", "arrived_s", "batch_seqs", "deadline_s", "future",
        "launched_s", "num_rows", "row_offsets", "sequences", "spans", "special", "token_outputs",
        "token_type_ids", "waiting_seqs", "waiting_tokens",
    )  # fmt: skip

    def __init__(
        self,
        sequences: RaggedIds,
        future: asyncio.Future[JobResult],
        arrived_s: float,
        deadline_s: float = math.inf,
        token_type_ids: Sequence[Int32 | None] | None = None,
        spans: Sequence[Int32 | None] | None = None,
        token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS,
    ) -> None:
        self.sequences = sequences
        self.future = future
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.token_type_ids = token_type_ids
        self.spans = spans
        self.token_outputs = token_outputs
        self.special = token_type_ids is not None or spans is not None or bool(token_outputs)
        self.row_offsets = _row_offsets(sequences, spans)
        self.num_rows = self.row_offsets[-1]
        self.launched_s: float | None = None
        self.batch_seqs = self.waiting_seqs = self.waiting_tokens = self._delivered = 0
        self._vectors: Float32 | None = None
        self._int8: Int8 | None = None
        self._tokens: dict[TokenOutput, Float32] = {}

    @property
    def done(self) -> bool:
        """Whether the job has its outcome; what still waits of it need not run."""
        return self.future.done()

    def fail(self, error: SchedulerError) -> None:
        """End with `error`, unless the job has ended already."""
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        """End with DeadlineExpired, unless the job has ended already."""
        if not self.future.done():
            self.future.set_exception(DeadlineExpired(self.deadline_s - self.arrived_s))

    def deliver(self, run: Run, rows: BatchResult, now_s: float) -> None:
        """Take the rows of one of the job's runs; end it with the last ones."""
        if self.future.done():
            return
        count = len(rows.vectors)
        if count == self.num_rows:
            self._finish(rows, now_s)
            return
        first_row = run.first_row
        if self._vectors is None:
            self._vectors = np.empty((self.num_rows, *rows.vectors.shape[1:]), np.float32)
            self._int8 = None if rows.int8 is None else np.empty(self._vectors.shape, np.int8)
        self._vectors[first_row : first_row + count] = rows.vectors
        if self._int8 is not None and rows.int8 is not None:
            self._int8[first_row : first_row + count] = rows.int8
        for kind, values in rows.tokens.items():
            if kind not in self._tokens:
                self._tokens[kind] = np.empty((len(self.sequences.flat), values.shape[1]), np.float32)
            self._tokens[kind][run.first_token : run.first_token + len(values)] = values
        self._delivered += count
        if self._delivered == self.num_rows:
            self._finish(BatchResult(self._vectors, self._int8, tokens=self._tokens), now_s)

    def _finish(self, rows: BatchResult, now_s: float) -> None:
        launched_s = now_s if self.launched_s is None else self.launched_s
        queue_ms, inference_ms = (launched_s - self.arrived_s) * 1e3, (now_s - launched_s) * 1e3
        tokens, squares = rows.tokens, rows.squares
        self.future.set_result(
            JobResult(rows.vectors, rows.int8, queue_ms, inference_ms, tokens, self.batch_seqs, squares)
        )

    def __repr__(self) -> str:
        state = "done" if self.done else f"{self.waiting_seqs} waiting, {self._delivered} delivered"
        return f"<Job of {self.num_rows}: {state}>"


def _row_offsets(sequences: RaggedIds, spans: Sequence[Int32 | None] | None) -> Sequence[int]:
    """Where the rows of each sequence begin, from 0, and how many there are."""
    if spans is None:
        return range(len(sequences.lengths) + 1)
    return (0, *accumulate(1 if own is None else len(own) for own in spans))


async def outcome(future: asyncio.Future[JobResult], metrics: SchedulerMetrics) -> JobResult:
    """A job's result, once it has one. What becomes of it is counted; it ends with who waits for it.

    Raises:
        scheduler.errors.SchedulerError: the job ended so.
    """
    try:
        result = await future
    except asyncio.CancelledError:
        metrics.cancelled += 1
        raise
    except SchedulerError as error:
        metrics.count_error(error)
        raise
    finally:
        future.cancel()
        del future  # it keeps the error, whose traceback keeps this frame: a cycle with the name
    metrics.completed += 1
    metrics.queue_ms.observe(result.queue_ms)
    return result


class Run:
    """Sequences number `first` to `last` of `job`, without the latter, which lie side by side. Never changes.

    num_seqs, num_tokens, num_rows: how many it has, and rows of its result.
    retry: 0, or the number of the half batch with which it runs again after the device ran out of memory.
    """

    __slots__ = ("first", "job", "last", "num_rows", "num_seqs", "num_tokens", "retry")

    def __init__(self, job: Job, first: int, last: int, retry: int = 0) -> None:
        offsets, row_offsets = job.sequences.offsets, job.row_offsets
        self.job = job
        self.first = first
        self.last = last
        self.num_seqs = last - first
        self.num_tokens = offsets[last] - offsets[first]
        self.num_rows = row_offsets[last] - row_offsets[first]
        self.retry = retry

    @property
    def first_row(self) -> int:
        """The place of its first row among all of the job's."""
        return self.job.row_offsets[self.first]

    @property
    def first_token(self) -> int:
        """The place of its first token among all of the job's."""
        return self.job.sequences.offsets[self.first]

    @property
    def sequences(self) -> RaggedIds:
        """Its ids, i32[n] each; not a copy."""
        return self.job.sequences.part(self.first, self.last)

    @property
    def token_type_ids(self) -> Sequence[Int32 | None] | None:
        """Of its sequences, as the job's."""
        types = self.job.token_type_ids
        return None if types is None else types[self.first : self.last]

    @property
    def spans(self) -> Sequence[Int32 | None] | None:
        """Of its sequences, as the job's."""
        spans = self.job.spans
        return None if spans is None else spans[self.first : self.last]

    def fitting(self, max_tokens: int, max_rows: int) -> int:
        """Where it must end to have no more than these; `first`, if not even one sequence fits."""
        if self.num_tokens <= max_tokens and self.num_rows <= max_rows:
            return self.last
        ends = (
            bisect_right(offsets, offsets[self.first] + most, self.first + 1, self.last + 1) - 1
            for offsets, most in ((self.job.sequences.offsets, max_tokens), (self.job.row_offsets, max_rows))
        )
        return min(ends)

    def __repr__(self) -> str:
        retried = ", retried" if self.retry else ""
        return f"<Run {self.first}..{self.last}, {self.num_tokens} tokens{retried}>"


class RunCounts:
    """How much waits in a queue of runs, kept with what waits of each job.

    num_seqs, num_tokens: of what is still wanted; of ended jobs that were dropped nothing counts any more.
    """

    __slots__ = ("num_seqs", "num_tokens")

    def __init__(self) -> None:
        self.num_seqs = 0
        self.num_tokens = 0

    def came(self, run: Run) -> None:
        """It waits."""
        job, seqs, tokens = run.job, run.num_seqs, run.num_tokens
        self.num_seqs += seqs
        self.num_tokens += tokens
        job.waiting_seqs += seqs
        job.waiting_tokens += tokens

    def went(self, run: Run) -> None:
        """It was taken."""
        job, seqs, tokens = run.job, run.num_seqs, run.num_tokens
        self.num_seqs -= seqs
        self.num_tokens -= tokens
        job.waiting_seqs -= seqs
        job.waiting_tokens -= tokens

    def forget(self, job: Job) -> bool:
        """Nothing of `job` waits any more; whether anything did."""
        waited = job.waiting_seqs > 0
        self.num_seqs -= job.waiting_seqs
        self.num_tokens -= job.waiting_tokens
        job.waiting_seqs = job.waiting_tokens = 0
        return waited


def scatter(runs: Sequence[Run], result: BatchResult, now_s: float) -> None:
    """Give each job its rows of `result`, which lie side by side as its run does in the batch.

    A job with a row that is not finite fails; the others of the batch are as good as ever.
    """
    for row in result.non_finite:
        job, own_row = _owner(runs, row)
        job.fail(StepFailed(f"the model gave a vector with NaN or infinity for input[{own_row}]"))
    first_row = first_token = 0
    for run in runs:
        end_row = first_row + run.num_rows
        rows = result if len(runs) == 1 else result.rows(first_row, end_row)
        if result.tokens:
            end_token = first_token + run.num_tokens
            own = {kind: result.tokens[kind][first_token:end_token] for kind in run.job.token_outputs}
            rows, first_token = replace(rows, tokens=own), end_token
        run.job.deliver(run, rows, now_s)
        first_row = end_row


def _owner(runs: Sequence[Run], row: int) -> tuple[Job, int]:
    """The job that row `row` of a batch is of, and which of its rows that is."""
    first_row = 0
    for run in runs:
        if row < first_row + run.num_rows:
            return run.job, run.first_row + row - first_row
        first_row += run.num_rows
    raise IndexError(f"row {row} of a batch of {first_row}")
