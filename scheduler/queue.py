"""What waits, strictly first come, first served. Each change of state is one synchronous call; no loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows

from rose.batch import NO_TOKEN_OUTPUTS, Int32, TokenOutput
from scheduler.sequence import Job, Sequence

# Rows of ended jobs stay in the deque until popped, or until they outnumber the live ones by so many:
# then one pass removes them, so that a storm of cancelled calls cannot fill the memory while a step is slow.
_MAX_DEAD_ROWS = 256


class SequenceQueue:
    """The deque of waiting sequences, and its counts.

    num_seqs, num_tokens: what waits and is still wanted; the rows of ended jobs count no longer.
    most_tokens: of a batch that gives these outputs of each; not asked if there are none.
    """

    __slots__ = ("_most_tokens", "_retries", "_waiting", "num_seqs", "num_tokens")

    def __init__(self, most_tokens: Callable[[frozenset[TokenOutput]], int] = lambda _: 0) -> None:
        self._most_tokens = most_tokens
        self._waiting: deque[Sequence] = deque()
        self._retries = 0
        self.num_seqs = 0
        self.num_tokens = 0

    def append(
        self,
        job: Job,
        input_ids: Rows[Int32],
        token_type_ids: Rows[Int32 | None] | None = None,
        spans: Rows[Int32 | None] | None = None,
    ) -> None:
        """Put all of `job` at the end: input_ids i32[n] each, token_type_ids as long, spans i32[k, 2]."""
        row = num_tokens = 0
        for index, ids in enumerate(input_ids):
            types = None if token_type_ids is None else token_type_ids[index]
            sequence = Sequence(job, row, ids, types, None if spans is None else spans[index])
            sequence.first_token = num_tokens
            self._waiting.append(sequence)
            row += sequence.num_rows
            num_tokens += sequence.num_tokens
        num_seqs = len(input_ids)
        self.num_seqs += num_seqs
        self.num_tokens += num_tokens
        job.waiting_seqs += num_seqs
        job.waiting_tokens += num_tokens

    def take(
        self, max_tokens: int, max_rows: int, now_s: float, apart_tokens: int | None = None
    ) -> list[Sequence]:
        """Pop the next batch: as many of the first sequences as fit, or one that is longer than `max_tokens`.

        max_rows: of their results, which are no fewer than the sequences.
        apart_tokens: a job that waits with more than so many is not begun behind others; None: any is.
        Rows of ended jobs are dropped, and jobs whose deadline has passed end here with DeadlineExpired.
        Half batches that run again are never joined with others. Empty when nothing waits.
        """
        self.drop_ended(now_s)
        if self._is_one_batch(max_tokens, max_rows):
            batch = list(self._waiting)
            self._waiting.clear()
            self.drop(batch[0].job)
            return batch
        batch = []
        tokens = rows = 0
        kinds = NO_TOKEN_OUTPUTS
        while rows < max_rows:
            self.drop_ended(now_s)
            if not self._waiting:
                break
            first = self._waiting[0]
            job = first.job
            together = kinds | job.token_outputs
            limit = min(max_tokens, self._most_tokens(together)) if together else max_tokens
            if batch and (
                tokens + first.num_tokens > limit
                or rows + first.num_rows > max_rows
                or first.retry != batch[0].retry
                or (apart_tokens is not None and _stands_apart(job, batch[-1], apart_tokens))
            ):
                break
            self._waiting.popleft()
            kinds = together
            job.waiting_seqs -= 1
            job.waiting_tokens -= first.num_tokens
            tokens += first.num_tokens
            rows += first.num_rows
            batch.append(first)
        self.num_seqs -= len(batch)
        self.num_tokens -= tokens
        return batch

    def _is_one_batch(self, max_tokens: int, max_rows: int) -> bool:
        """Whether all that waits is of one job and makes one batch, as it mostly is for few clients."""
        if not self._waiting:
            return False
        first, last = self._waiting[0], self._waiting[-1]
        job, kinds = first.job, first.job.token_outputs
        if job.waiting_seqs != len(self._waiting) or first.retry != last.retry or job.num_rows > max_rows:
            return False
        return job.waiting_tokens <= (min(max_tokens, self._most_tokens(kinds)) if kinds else max_tokens)

    def drop_ended(self, now_s: float) -> None:
        """Forget what comes first of ended jobs, and of those whose deadline has passed, which end here."""
        while self._waiting and ((job := self._waiting[0].job).done or now_s >= job.deadline_s):
            self._waiting.popleft()
            job.expire()
            self.drop(job)

    def drop(self, job: Job) -> None:
        """Forget what waits of `job`, which has ended. May be called again."""
        self.num_seqs -= job.waiting_seqs
        self.num_tokens -= job.waiting_tokens
        job.waiting_seqs = job.waiting_tokens = 0
        if len(self._waiting) > 2 * self.num_seqs + _MAX_DEAD_ROWS:
            self._waiting = deque(sequence for sequence in self._waiting if sequence.job.waiting_seqs)

    def retry_halves(self, batch: Rows[Sequence]) -> None:
        """Put `batch` back at the front, to run again as two batches; behind halves that wait already."""
        older: list[Sequence] = []
        while self.retrying:
            older.append(self._waiting.popleft())
        live = [sequence for sequence in batch if not sequence.job.done]
        for half in (live[: len(live) // 2], live[len(live) // 2 :]):
            self._retries += 1
            for sequence in half:
                sequence.retry = self._retries
                sequence.job.waiting_seqs += 1
                sequence.job.waiting_tokens += sequence.num_tokens
        self.num_seqs += len(live)
        self.num_tokens += sum(sequence.num_tokens for sequence in live)
        self._waiting.extendleft(reversed(older + live))

    @property
    def retrying(self) -> bool:
        """Whether the next batch is half of one for which the device had too little memory."""
        return bool(self._waiting) and self._waiting[0].retry > 0

    @property
    def first_job_tokens(self) -> int:
        """What waits of the job at the front, in tokens; 0 if there is none. See `drop_ended`."""
        return self._waiting[0].job.waiting_tokens if self._waiting else 0

    def __len__(self) -> int:
        return self.num_seqs

    def __repr__(self) -> str:
        dead = len(self._waiting) - self.num_seqs
        return (
            f"<SequenceQueue {self.num_seqs} seqs, {self.num_tokens} tokens waiting"
            f"{', retrying' if self.retrying else ''}{f', {dead} dead rows' if dead else ''}>"
        )


def _stands_apart(job: Job, before: Sequence, apart_tokens: int) -> bool:
    """Whether `job`, of which a batch that ends with `before` has nothing, is too large to begin there."""
    return job is not before.job and job.waiting_tokens > apart_tokens
