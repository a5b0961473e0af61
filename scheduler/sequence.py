"""One sequence, the job it belongs to, and how a step's rows get back to it. Knows no queue, no engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import numpy as np

from rose.batch import NO_TOKEN_OUTPUTS, BatchResult, Float32, Int8, Int32, TokenOutput
from scheduler.errors import DeadlineExpired, SchedulerError, StepFailed
from scheduler.metrics import SchedulerMetrics


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """What `Batcher.run` returns, a row a sequence or span, in the job's order.

    vectors: f32[n, D]. int8: i8[n, D] or None. Views of the step's output when one step held the whole job.
    queue_ms: from acceptance to the launch of the first sequence.
    inference_ms: from there to the last sequence's result.
    tokens: f32[T, W] of each kind that was asked for, all sequences' tokens end to end.
    batch_seqs: sequences of the batch that the first of them was in, those of other jobs among them.
    squares: as of BatchResult, where one step held the whole job and knew them.
    """

    vectors: Float32
    int8: Int8 | None
    queue_ms: float
    inference_ms: float
    tokens: Mapping[TokenOutput, Float32] = field(default_factory=dict)
    batch_seqs: int = 0
    squares: Float32 | None = None


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """The sequences of one call, and the future of who waits for them. Ends once: result, error or cancelled.

    arrived_s, deadline_s: on the batcher's clock; deadline_s is infinite for a job that has none.
    num_rows: of its result. launched_s: when its first sequence was launched, in a batch of batch_seqs.
    waiting_seqs, waiting_tokens: its part of the queue's counts; kept by SequenceQueue alone.
    token_outputs: what its result holds for each of its num_tokens tokens.
    """

    num_rows: int
    future: asyncio.Future[JobResult]
    arrived_s: float
    deadline_s: float = math.inf
    launched_s: float | None = None
    batch_seqs: int = 0
    waiting_seqs: int = 0
    waiting_tokens: int = 0
    token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS
    num_tokens: int = 0
    _delivered: int = 0
    _vectors: Float32 | None = None
    _int8: Int8 | None = None
    _tokens: dict[TokenOutput, Float32] = field(default_factory=dict)

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

    def deliver(self, first: Sequence, rows: BatchResult, now_s: float) -> None:
        """Take the rows of the job's sequences from `first` on; end it with the last ones."""
        if self.future.done():
            return
        count, first_row = len(rows.vectors), first.row
        if count == self.num_rows:
            self._finish(rows, now_s)
            return
        if self._vectors is None:
            self._vectors = np.empty((self.num_rows, *rows.vectors.shape[1:]), np.float32)
            self._int8 = None if rows.int8 is None else np.empty(self._vectors.shape, np.int8)
        self._vectors[first_row : first_row + count] = rows.vectors
        if self._int8 is not None and rows.int8 is not None:
            self._int8[first_row : first_row + count] = rows.int8
        for kind, values in rows.tokens.items():
            if kind not in self._tokens:
                self._tokens[kind] = np.empty((self.num_tokens, values.shape[1]), np.float32)
            self._tokens[kind][first.first_token : first.first_token + len(values)] = values
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


class Sequence:
    """Row `row` of `job`, or rows from there: input_ids i32[n], token_type_ids i32[n] or None.

    spans: i32[k, 2], the parts of it whose means are wanted, k >= 1; None: all of it. num_rows: k, or 1.
    first_token: the place of its first token among all of the job's. special: it is more than its ids.
    retry: 0, or the number of the half batch with which it runs again after the device ran out of memory.
    """

    __slots__ = (
        "first_token",
        "input_ids",
        "job",
        "num_rows",
        "num_tokens",
        "retry",
        "row",
        "spans",
        "special",
        "token_type_ids",
    )

    def __init__(
        self,
        job: Job,
        row: int,
        input_ids: Int32,
        token_type_ids: Int32 | None = None,
        spans: Int32 | None = None,
    ) -> None:
        self.job = job
        self.row = row
        self.input_ids = input_ids
        self.token_type_ids = token_type_ids
        self.spans = spans
        self.num_rows = 1 if spans is None else len(spans)
        self.num_tokens = len(input_ids)
        self.special = token_type_ids is not None or spans is not None or bool(job.token_outputs)
        self.first_token = 0
        self.retry = 0

    def __repr__(self) -> str:
        return f"<Sequence row {self.row}, {self.num_tokens} tokens{', retried' if self.retry else ''}>"


def scatter(sequences: Rows[Sequence], result: BatchResult, now_s: float) -> None:
    """Give each job its rows of `result`; the rows of one job lie side by side in a batch.

    A job with a row that is not finite fails; the others of the batch are as good as ever.
    """
    for row in result.non_finite:
        job, own_row = _owner(sequences, row)
        job.fail(StepFailed(f"the model gave a vector with NaN or infinity for input[{own_row}]"))
    has_spans = len(result.vectors) != len(sequences)
    start = first_row = first_token = 0
    while start < len(sequences):
        job, end = sequences[start].job, start + 1
        while end < len(sequences) and sequences[end].job is job:
            end += 1
        count = sum(sequence.num_rows for sequence in sequences[start:end]) if has_spans else end - start
        end_row = first_row + count
        rows = result if end - start == len(sequences) else result.rows(first_row, end_row)
        if result.tokens:
            end_token = first_token + sum(sequence.num_tokens for sequence in sequences[start:end])
            own = {kind: result.tokens[kind][first_token:end_token] for kind in job.token_outputs}
            rows, first_token = replace(rows, tokens=own), end_token
        job.deliver(sequences[start], rows, now_s)
        start, first_row = end, end_row


def _owner(sequences: Rows[Sequence], row: int) -> tuple[Job, int]:
    """The job that row `row` of a batch is of, and which of its rows that is."""
    first_row = 0
    for sequence in sequences:
        if row < first_row + sequence.num_rows:
            return sequence.job, sequence.row + row - first_row
        first_row += sequence.num_rows
    raise IndexError(f"row {row} of a batch of {first_row}")
