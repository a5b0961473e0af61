"""What waits, strictly first come, first served. Each change of state is one synchronous call; no loop."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from rose.batch import NO_TOKEN_OUTPUTS, TokenOutput
from scheduler.job import Job, Run, RunCounts


class SequenceQueue(RunCounts):
    """The waiting sequences, as a run a job, and their counts.

    most_tokens: of a batch that gives these outputs of each; not asked if there are none.
    """

    __slots__ = ("_again", "_most_tokens", "_retries", "_waiting")

    def __init__(self, most_tokens: Callable[[frozenset[TokenOutput]], int] = lambda _: 0) -> None:
        super().__init__()
        self._most_tokens = most_tokens
        # In order of arrival. Not a plain dict: that looks for its first item among all that came before.
        self._waiting: OrderedDict[Job, Run] = OrderedDict()
        self._again: deque[Run] = deque()  # of half batches: before all others
        self._retries = 0

    def append(self, job: Job) -> None:
        """Put all of `job` at the end. Once only."""
        run = self._waiting[job] = Run(job, 0, len(job.sequences.lengths))
        self.came(run)

    def take(
        self, max_tokens: int, max_rows: int, now_s: float, apart_tokens: int | None = None
    ) -> list[Run]:
        """Pop the next batch: as many of the first sequences as fit, or one that is longer than `max_tokens`.

        max_rows: of their results, which are no fewer than the sequences.
        apart_tokens: a job that waits with more than so many is not begun behind others; None: any is.
        Ended jobs are dropped, and jobs whose deadline has passed end here with DeadlineExpired.
        Half batches that run again are never joined with others. No job has two runs in a batch. Empty when
        nothing waits.
        """
        batch: list[Run] = []
        tokens = rows = 0
        kinds, limit = NO_TOKEN_OUTPUTS, max_tokens
        while rows < max_rows and (run := self.drop_ended(now_s)) is not None:
            job, end = run.job, run.last
            if batch and (run.retry != batch[0].retry or _begins_apart(job, apart_tokens)):
                break
            if kinds or job.token_outputs:
                kinds |= job.token_outputs
                limit = min(max_tokens, self._most_tokens(kinds))
            if tokens + run.num_tokens > limit or rows + run.num_rows > max_rows:
                end = run.fitting(limit - tokens, max_rows - rows)
                if end == run.first and batch:
                    break
                end = max(end, run.first + 1)
            if end < run.last:
                run = self._split(run, end)
            elif run.retry:
                self._again.popleft()
            else:
                del self._waiting[job]
            self.went(run)
            batch.append(run)
            tokens += run.num_tokens
            rows += run.num_rows
        return batch

    def drop_ended(self, now_s: float) -> Run | None:
        """Drop ended jobs from the front, and late ones, which end here; what then comes first."""
        while (run := self._again[0] if self._again else self._newcomer()) is not None:
            job = run.job
            if not (job.future.done() or now_s >= job.deadline_s):
                break
            job.expire()
            self.drop(job)
            if run.retry:
                self._again.popleft()
        return run

    def drop(self, job: Job) -> None:
        """Forget what waits of `job`, which has ended. May be called again.

        Its halves stay where they are until they come first: many jobs may end at once, with many halves.
        """
        if self.forget(job):
            self._waiting.pop(job, None)

    def retry_halves(self, batch: Sequence[Run]) -> None:
        """Put `batch` back at the front, to run again as two batches; behind halves that wait already."""
        live = [run for run in batch if not run.job.done]
        left = sum(run.num_seqs for run in live) // 2  # of the first half
        self._retries += 2
        halves: tuple[list[Run], list[Run]] = [], []
        for run in live:
            middle = run.first + min(left, run.num_seqs)
            left -= middle - run.first
            if middle > run.first:
                halves[0].append(Run(run.job, run.first, middle, self._retries - 1))
            if middle < run.last:
                halves[1].append(Run(run.job, middle, run.last, self._retries))
            self.came(run)
        self._again.extend(halves[0] + halves[1])

    @property
    def retrying(self) -> bool:
        """Whether the next batch is half of one for which the device had too little memory."""
        return bool(self._again)

    @property
    def first_job_tokens(self) -> int:
        """What waits of the job at the front, in tokens; 0 if there is none. See `drop_ended`."""
        run = self._again[0] if self._again else self._newcomer()
        return 0 if run is None else run.job.waiting_tokens

    def _newcomer(self) -> Run | None:
        """What comes first of all that was not tried before."""
        return next(iter(self._waiting.values())) if self._waiting else None

    def _split(self, run: Run, end: int) -> Run:
        """Take the sequences before number `end` of what comes first; the others keep its place."""
        rest = Run(run.job, end, run.last, run.retry)
        if run.retry:
            self._again[0] = rest
        else:
            self._waiting[run.job] = rest
        return Run(run.job, run.first, end, run.retry)

    def __len__(self) -> int:
        return self.num_seqs

    def __repr__(self) -> str:
        waits = f"{self.num_seqs} seqs, {self.num_tokens} tokens waiting"
        return f"<SequenceQueue {waits}{', retrying' if self.retrying else ''}>"


def _begins_apart(job: Job, apart_tokens: int | None) -> bool:
    """Whether `job` is too large to be begun behind others."""
    return apart_tokens is not None and job.waiting_tokens > apart_tokens
