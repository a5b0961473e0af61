"""The loop around the queue: launches batches, awaits them in order, and ends every job exactly once.

Knows nothing of text, HTTP or devices. When and how much to launch is `Pacer`'s; all state lies in
`SequenceQueue` and `InFlight`, and changes only between two awaits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from math import inf

from rose.batch import NO_TOKEN_OUTPUTS, Engine, Int32, RaggedBatch, RaggedIds, TokenOutput
from rose.errors import EngineDeadError, OutOfMemoryError, StepError
from scheduler.admission import check_job, check_room
from scheduler.capturing import capturing
from scheduler.errors import Draining, EngineDead, SchedulerError, StepFailed, StepOutOfMemory
from scheduler.inflight import InFlight, Step
from scheduler.job import Job, JobResult, Run, outcome, scatter
from scheduler.metrics import SchedulerMetrics
from scheduler.options import SchedulerOptions
from scheduler.pacing import Pacer
from scheduler.queue import SequenceQueue

_LOG = logging.getLogger(__name__)

_TIMER_GRAIN_S = 0.001  # loops round timers to milliseconds; what is nearer than this is asked every turn

# Between two looks at the deadlines, a job. A look takes 0.1 µs a job: 5 % of the loop's time at worst.
_EXPIRY_PAUSE_S = 2e-6


class Batcher:
    """Turns concurrent `run` calls into batches for one engine. Lives on one event loop.

    on_dead: called once with the reason when the engine can run nothing more; the process should then exit.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        options: SchedulerOptions,
        *,
        on_dead: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._capturing = capturing(engine)
        self._info = engine.info
        self._options = options
        self._on_dead = on_dead
        self._clock = clock
        self._pacer = Pacer(self._info, options)
        self._queue = SequenceQueue(self._info.most_tokens)
        self._in_flight = InFlight()
        self._jobs: set[Job] = set()
        self._metrics = SchedulerMetrics()
        self._launched = asyncio.Event()
        self._turn_soon = False
        self._turn_timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_s = inf  # when it fires
        self._collector: asyncio.Task[None] | None = None
        self._dead_reason: str | None = None
        self._draining = False

    @property
    def healthy(self) -> bool:
        """False once the engine is dead; for good."""
        return self._dead_reason is None

    @property
    def metrics(self) -> SchedulerMetrics:
        """The counters, with gauges as of now."""
        metrics = self._metrics
        metrics.waiting_seqs, metrics.waiting_tokens = self._queue.num_seqs, self._queue.num_tokens
        metrics.running_batches, metrics.running_seqs = len(self._in_flight), self._in_flight.num_seqs
        metrics.token_budget = self._pacer.budget(self._queue)
        metrics.tokens_per_s = self._pacer.cost.tokens_per_s
        return metrics

    async def start(self) -> None:
        """Begin to run batches on the current loop. Once only."""
        self._loop = asyncio.get_running_loop()
        self._collector = self._loop.create_task(self._collect(), name="scheduler-collector")

    async def close(self, drain_s: float) -> None:
        """Refuse new jobs, give the accepted ones `drain_s` seconds, then fail them with Draining.

        Leaves the engine open. May be called again.
        """
        self._draining = True
        try:
            if self._jobs:
                await asyncio.wait([job.future for job in self._jobs], timeout=drain_s)
        finally:
            self._fail_all(lambda: Draining("not done within the time that a shutdown allows"))
            for timer in (self._turn_timer, self._watchdog, self._deadline_timer):
                if timer is not None:
                    timer.cancel()
            if self._collector is not None:
                self._collector.cancel()
                await asyncio.wait([self._collector])

    async def run(
        self,
        sequences: Sequence[Int32],
        token_type_ids: Sequence[Int32 | None] | None = None,
        deadline_s: float | None = None,
        spans: Sequence[Int32 | None] | None = None,
        token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS,
    ) -> JobResult:
        """Vectors of `sequences` (each i32[n], 1 <= n <= engine.info.max_batch_tokens), a row each.

        token_type_ids: a row as long as its sequence, or None for zeros. deadline_s: seconds until
        the last sequence must have been launched. spans: i32[k, 2] of a sequence, which then gives k rows,
        means of its tokens [start, end); None: one row. token_outputs: what is wanted of each token besides.
        Cancelling the call drops what still waits.

        Raises:
            QueueFull, Draining, EngineDead: refused; nothing was accepted.
            DeadlineExpired, StepFailed, StepOutOfMemory, Draining, EngineDead: accepted, but ended so.
            ValueError: no sequence, or one of an impossible length; or no such token outputs.
        """
        ids = RaggedIds.of(sequences)
        job = self._accept(ids, token_type_ids, deadline_s, spans, token_outputs)
        try:
            return await outcome(job.future, self._metrics)
        finally:
            self._queue.drop(job)
            self._jobs.discard(job)
            del job  # its future keeps the error, whose traceback keeps this frame: a cycle with the name

    def _accept(
        self,
        sequences: RaggedIds,
        token_type_ids: Sequence[Int32 | None] | None,
        deadline_s: float | None,
        spans: Sequence[Int32 | None] | None,
        token_outputs: frozenset[TokenOutput],
    ) -> Job:
        """Queue a job, or raise; see `run`."""
        check_job(sequences, token_type_ids, spans, token_outputs, self._info)
        try:
            self._check_open()
            check_room(self._queue, self._options, self._pacer.cost, sequences)
        except SchedulerError as refusal:
            self._metrics.count_refusal(refusal)
            raise
        now_s = self._clock()
        deadline = inf if deadline_s is None else now_s + deadline_s
        future = self._loop.create_future()
        job = Job(sequences, future, now_s, deadline, token_type_ids, spans, token_outputs)
        self._jobs.add(job)
        if deadline < self._deadline_s:
            self._expire_at(deadline)
        self._queue.append(job)
        self._metrics.accepted += 1
        self._wake()
        return job

    def _check_open(self) -> None:
        if self._dead_reason is not None:
            raise EngineDead(self._dead_reason)
        if self._draining:
            raise Draining("the server is shutting down")
        if self._collector is None:
            raise RuntimeError("run() before start()")

    def _expire_at(self, deadline_s: float) -> None:
        """One timer serves all deadlines, which mostly rise: a timer a job costs 5 µs more."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_s = deadline_s
        self._deadline_timer = self._loop.call_later(max(0.0, deadline_s - self._clock()), self._expire_due)

    def _expire_due(self) -> None:
        """Fail every job whose deadline has come while a part of it still waits."""
        self._deadline_timer, self._deadline_s = None, inf
        due_s = self._clock() + _TIMER_GRAIN_S
        waiting = [job for job in self._jobs if job.waiting_seqs and not job.done]
        for job in waiting:
            if job.deadline_s <= due_s:
                job.expire()
        next_s = min((job.deadline_s for job in waiting if not job.done), default=inf)
        if next_s < inf:
            self._expire_at(max(next_s, due_s + _EXPIRY_PAUSE_S * len(self._jobs)))

    def _wake(self) -> None:
        """Something arrived: see to it once this turn's other arrivals are in, or when the timer fires."""
        if self._turn_soon or len(self._in_flight) >= self._options.max_in_flight:
            return
        if self._turn_timer is None or self._pacer.full(self._queue):
            self._turn_soon = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Launch what should be launched now, and come back when the next launch is due."""
        self._turn_soon = False
        if self._turn_timer is not None:
            self._turn_timer.cancel()
            self._turn_timer = None
        try:
            while self._queue.num_seqs and len(self._in_flight) < self._options.max_in_flight:
                if self._in_flight and self._queue.retrying:
                    return  # a half batch runs alone, with all the memory there is
                wait_s = self._pacer.launch_in_s(self._queue, self._in_flight, self._clock())
                if wait_s > 0:
                    self._turn_timer = self._loop.call_later(max(0.0, wait_s - _TIMER_GRAIN_S), self._turn)
                    return
                self._launch()
        except Exception as error:
            self._fail(error)

    def _launch(self) -> None:
        """Give the engine the next batch; after this the queue is shorter, whatever the engine says."""
        now_s = self._clock()
        self._queue.drop_ended(now_s)  # what comes first is asked for its size
        max_tokens, apart_tokens = self._pacer.next_batch(self._queue)
        runs = self._queue.take(max_tokens, self._info.max_batch_seqs, now_s, apart_tokens)
        if not runs:
            return
        if self._capturing is not None:
            self._capturing.capture_freely = not self._pacer.full(self._queue)
        num_seqs, num_tokens = _size(runs)
        for run in runs:
            if run.job.launched_s is None:
                run.job.launched_s, run.job.batch_seqs = now_s, num_seqs
        try:
            batch = _pack(runs)
            lazy = self._engine.step(batch)
        except Exception as error:
            self._step_failed(runs, error)
            return
        finally:  # not before: the device works meanwhile
            self._metrics.count_launch(num_tokens, num_seqs)
        predicted_s = self._pacer.cost.predict(num_tokens, num_seqs) / 1e3
        rows, kinds = batch.num_rows, batch.token_outputs
        step = Step(runs, num_seqs, num_tokens, rows, lazy, now_s, predicted_s, token_outputs=kinds)
        self._in_flight.add(step)
        self._launched.set()
        if self._watchdog is None:
            self._watch()

    def _watch(self) -> None:
        """Declare the engine dead when the step that runs does so for too long; look again when it may be."""
        self._watchdog = None
        if not self._in_flight:
            return
        limit_s, head = self._options.step_timeout_s, self._in_flight.head
        left_s = head.started_s + limit_s - self._clock()
        if left_s > 0 or head.lazy.done:  # done, but not seen yet: then it was this process that stood still
            self._watchdog = self._loop.call_later(left_s if left_s > 0 else limit_s, self._watch)
        else:
            self._die(f"a step of {head.num_tokens} tokens has not finished in step_timeout_s={limit_s:g}")

    async def _collect(self) -> None:
        """Await the steps in their order, for as long as the engine lives."""
        try:
            while self.healthy:
                if not self._in_flight:
                    self._launched.clear()
                    await self._launched.wait()
                await self._collect_head()
                self._turn()
        except Exception as error:
            self._fail(error)
        finally:
            if not self._draining:
                self._die("the scheduler was stopped")

    async def _collect_head(self) -> None:
        step = self._in_flight.head
        # A step that ended unseen behind another one has no measurable time of its own.
        measurable = step.alone or not step.lazy.done
        try:
            result = await step.lazy
            step.check(result, self._info)
        except Exception as error:
            self._in_flight.finish(self._clock())
            self._step_failed(step.runs, error)
            error.__traceback__ = None  # it keeps this frame, whose step keeps the error: a cycle
            return
        now_s = self._clock()
        self._in_flight.finish(now_s)
        scatter(step.runs, result, now_s)
        # Behind those who have waited for these rows: their answers come first.
        self._loop.call_soon(self._learn, step, (now_s - step.started_s) * 1e3, measurable)

    def _learn(self, step: Step, step_ms: float, measurable: bool) -> None:
        """Count a step that took so long, and what it says of the next."""
        try:
            self._metrics.step_ms.observe(step_ms)
            if measurable and step_ms > 0:
                self._pacer.cost.observe(step.num_tokens, step.num_seqs, step_ms)
        except Exception as error:
            self._fail(error)

    def _step_failed(self, runs: list[Run], error: Exception) -> None:
        """End the jobs of a failed batch, or run its halves if memory was short.

        Once, but for a batch that is larger than those of many jobs ever are.
        """
        self._metrics.batches_failed += 1
        if isinstance(error, EngineDeadError):
            self._die(str(error))
            return
        num_seqs, num_tokens = _size(runs)
        large = num_tokens > self._options.max_budget_tokens
        again = num_seqs > 1 and (large or not runs[0].retry)
        if isinstance(error, OutOfMemoryError) and again:
            _LOG.warning("out of memory with %d sequences; running them in halves: %s", num_seqs, error)
            self._metrics.batches_halved += 1
            self._queue.retry_halves(runs)
            return
        if not isinstance(error, StepError):
            _LOG.error("the engine raised what it should not", exc_info=error)
        kind = StepOutOfMemory if isinstance(error, OutOfMemoryError) else StepFailed
        for run in runs:
            run.job.fail(kind(str(error)))

    def _fail(self, error: Exception) -> None:
        """A fault of the scheduler's own, which is being handled: nothing it does can be relied on now."""
        _LOG.exception("the scheduler failed")
        self._die(f"the scheduler failed: {error!r}")

    def _die(self, reason: str) -> None:
        """The engine is gone: everything ends, and nothing is accepted any more."""
        if self._dead_reason is not None:
            return
        self._dead_reason = reason
        _LOG.critical("the engine is dead: %s", reason)
        self._fail_all(lambda: EngineDead(reason))
        if self._collector is not None:
            self._collector.cancel()
        if self._on_dead is not None:
            self._on_dead(reason)

    def _fail_all(self, error: Callable[[], SchedulerError]) -> None:
        for job in self._jobs:
            job.fail(error())

    def __repr__(self) -> str:
        state = "draining" if self._draining else "running"
        state = state if self.healthy else "dead"
        return f"<Batcher {state} {self._in_flight!r} {self._queue!r} {self._pacer.cost!r}>"


def _size(runs: list[Run]) -> tuple[int, int]:
    """Sequences and tokens of a batch."""
    num_seqs = num_tokens = 0
    for run in runs:
        num_seqs += run.num_seqs
        num_tokens += run.num_tokens
    return num_seqs, num_tokens


def _pack(runs: list[Run]) -> RaggedBatch:
    """The batch of `runs`; most have neither token types nor spans, and want nothing of tokens."""
    sequences = runs[0].sequences if len(runs) == 1 else RaggedIds.join([run.sequences for run in runs])
    if not any(run.job.special for run in runs):
        return RaggedBatch.pack(sequences)
    return RaggedBatch.pack(
        sequences,
        _of_each([(run.num_seqs, run.token_type_ids) for run in runs]),
        _of_each([(run.num_seqs, run.spans) for run in runs]),
        NO_TOKEN_OUTPUTS.union(*{run.job.token_outputs for run in runs}),
    )


def _of_each(parts: list[tuple[int, Sequence[Int32 | None] | None]]) -> list[Int32 | None] | None:
    """What each sequence has, of parts of so many with some or with none; None: none has any."""
    rows = [row for count, own in parts for row in ([None] * count if own is None else own)]
    return rows if any(row is not None for row in rows) else None
