"""Several replicas behind one `run`, in the place of `scheduler.batcher.Batcher`: splits, sends, joins.

What waits, waits here: a replica has no more under way than it does in a moment, so that the next chunk goes
to whoever is free first. All changes of state are synchronous; `send` alone does I/O.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any

from gateway.replicas.choice import choose
from gateway.replicas.chunks import MOST_TOKENS, Chunk, ChunkQueue, chunk_limits, split
from gateway.replicas.errors import Busy, Expired, Lost, NotSent, Rejected, ReplicaError, Unavailable
from gateway.replicas.replica import Replica, why_none_serves
from rose.batch import NO_TOKEN_OUTPUTS, BatchResult, EngineInfo, Int32, RaggedIds, TokenOutput
from scheduler.admission import check_job, check_room
from scheduler.errors import Draining, NoReplica, SchedulerError, StepFailed, StepOutOfMemory
from scheduler.job import Job, JobResult, outcome
from scheduler.metrics import SchedulerMetrics
from scheduler.options import SchedulerOptions

log = logging.getLogger(__name__)

# Replicas may begin with a chunk so often, all of them together.
MAX_ATTEMPTS = 2
# When clients should come back if no replica serves: as often as probes look.
RETRY_AFTER_S = 1.0

# Has a chunk run at a replica. left_s: seconds until it must have been started there; None: no matter when.
Send = Callable[[Replica, Chunk, float | None], Coroutine[Any, Any, BatchResult]]


class Balancer:
    """Spreads jobs over `replicas`, which whoever owns it adds and removes. Lives on one event loop.

    info: of the model that they all serve. clock: monotonic seconds.
    """

    def __init__(
        self,
        info: EngineInfo,
        options: SchedulerOptions,
        send: Send,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.replicas: list[Replica] = []
        self._info = info
        self._options = options
        self._send = send
        self._clock = clock
        self._rng = rng or random.Random()
        self._queue = ChunkQueue()
        self._jobs: dict[Job, list[Chunk]] = {}
        self._running_chunks = self._running_seqs = 0
        self._metrics = SchedulerMetrics()
        self._pause_timer: asyncio.TimerHandle | None = None
        self._draining = False

    @property
    def healthy(self) -> bool:
        """Always: replicas come back without a restart of this process."""
        return True

    @property
    def ready(self) -> bool:
        """Whether any replica serves."""
        return any(replica.in_service for replica in self.replicas)

    @property
    def tokens_per_s(self) -> float:
        """What all replicas that serve do together."""
        return sum(replica.tokens_per_s for replica in self.replicas if replica.in_service)

    @property
    def metrics(self) -> SchedulerMetrics:
        """The counters, with gauges as of now; a batch is a chunk at a replica."""
        metrics = self._metrics
        metrics.waiting_seqs, metrics.waiting_tokens = self._queue.num_seqs, self._queue.num_tokens
        metrics.running_batches, metrics.running_seqs = self._running_chunks, self._running_seqs
        metrics.token_budget = MOST_TOKENS
        metrics.tokens_per_s = self.tokens_per_s
        return metrics

    async def close(self, drain_s: float) -> None:
        """Refuse new jobs, give the accepted ones `drain_s` seconds, then fail them with Draining.

        May be called again.
        """
        self._draining = True
        try:
            if self._jobs:
                await asyncio.wait([job.future for job in self._jobs], timeout=drain_s)
        finally:
            for job in list(self._jobs):
                job.fail(Draining("not done within the time that a shutdown allows"))
                self._cancel(self._jobs[job])
            if self._pause_timer is not None:
                self._pause_timer.cancel()

    async def run(
        self,
        sequences: Sequence[Int32],
        token_type_ids: Sequence[Int32 | None] | None = None,
        deadline_s: float | None = None,
        spans: Sequence[Int32 | None] | None = None,
        token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS,
    ) -> JobResult:
        """As Batcher.run, with the same arguments.

        Raises:
            QueueFull, NoReplica, Draining: refused; nothing was accepted.
            DeadlineExpired, StepFailed, StepOutOfMemory, NoReplica, Draining: accepted, but ended so.
            ValueError: no sequence, or one of an impossible length; or no such token outputs.
        """
        loop = asyncio.get_running_loop()
        ids = RaggedIds.of(sequences)
        job = self._accept(ids, token_type_ids, deadline_s, spans, token_outputs)
        timer = None if deadline_s is None else loop.call_later(deadline_s, self._expire, job)
        try:
            return await outcome(job.future, self._metrics)
        finally:
            if timer is not None:
                timer.cancel()
            self._queue.drop(job)
            self._cancel(self._jobs.pop(job))
            del job  # its future keeps the error, whose traceback keeps this frame: a cycle with the name

    def changed(self) -> None:
        """Replicas came, left, or are in another state than before."""
        self._fail_unserved()
        asyncio.get_running_loop().call_soon(self._turn)

    def give_up(self, replica: Replica, reason: str) -> None:
        """Take back what is under way at a replica that does not answer; it may run elsewhere."""
        for chunks in list(self._jobs.values()):
            for chunk in chunks:
                if chunk.task is not None and chunk.replica is replica:
                    chunk.taken_back = reason
                    chunk.task.cancel()

    def _accept(
        self,
        sequences: RaggedIds,
        token_type_ids: Sequence[Int32 | None] | None,
        deadline_s: float | None,
        spans: Sequence[Int32 | None] | None,
        token_outputs: frozenset[TokenOutput],
    ) -> Job:
        """Queue a job's chunks, or raise; see `run`."""
        check_job(sequences, token_type_ids, spans, token_outputs, self._info)
        try:
            self._check_open()
            check_room(self._queue, self._options, self, sequences)
        except SchedulerError as refusal:
            self._metrics.count_refusal(refusal)
            raise
        now_s = self._clock()
        deadline = inf if deadline_s is None else now_s + deadline_s
        future = asyncio.get_running_loop().create_future()
        job = Job(sequences, future, now_s, deadline, token_type_ids, spans, token_outputs)
        serving = sum(replica.in_service for replica in self.replicas)
        limits = chunk_limits(len(sequences.flat), serving, token_outputs, self._info)
        chunks = self._jobs[job] = list(split(job, *limits))
        for chunk in chunks:
            self._queue.append(chunk)
        self._metrics.accepted += 1
        self._turn()
        return job

    def _check_open(self) -> None:
        if self._draining:
            raise Draining("the server is shutting down")
        if not self.ready:
            raise self._none_serves()

    def _none_serves(self) -> NoReplica:
        return NoReplica(why_none_serves(self.replicas), RETRY_AFTER_S)

    def _fail_unserved(self) -> None:
        """What waits ends if there is nobody left to wait for."""
        if self.ready:
            return
        for job in self._jobs:
            if job.waiting_seqs:
                job.fail(self._none_serves())

    def _expire(self, job: Job) -> None:
        """What is under way has its deadline with it, and `send` waits no longer than that allows."""
        if job.waiting_seqs:
            job.expire()

    def _cancel(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk.task is not None:
                chunk.task.cancel()

    def _turn(self) -> None:
        """Send what can be sent now, and come back when a replica's pause ends.

        What found no room and what is waited for are judged at one moment: if a pause ended between two looks
        at the clock, nobody would come back to what waits.
        """
        now_s = self._clock()
        while (taken := self._queue.take(partial(self._place, now_s=now_s))) is not None:
            self._dispatch(*taken)
            now_s = self._clock()
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None
        if self._queue.num_seqs:
            pauses = [replica.paused_s(now_s) for replica in self.replicas if replica.in_service]
            wait_s = min((pause for pause in pauses if pause > 0), default=0.0)
            if wait_s:
                self._pause_timer = asyncio.get_running_loop().call_later(wait_s, self._turn)

    def _place(self, chunk: Chunk, now_s: float) -> Replica | None:
        """Where `chunk` may go now; where it failed only if nobody else serves."""
        replicas = self.replicas
        if chunk.tried:
            serving = [replica for replica in replicas if replica.in_service]
            replicas = [replica for replica in serving if replica not in chunk.tried] or serving
        return choose(replicas, chunk.num_tokens, now_s, self._rng)

    def _dispatch(self, chunk: Chunk, replica: Replica) -> None:
        now_s, job = self._clock(), chunk.job
        replica.sent(chunk.num_tokens, now_s)
        if job.launched_s is None:
            job.launched_s, job.batch_seqs = now_s, chunk.num_seqs
        self._metrics.count_launch(chunk.num_tokens, chunk.num_seqs)
        self._running_chunks += 1
        self._running_seqs += chunk.num_seqs
        chunk.replica, chunk.taken_back = replica, ""
        left_s = None if job.deadline_s == inf else job.deadline_s - now_s
        sending = self._send(replica, chunk, left_s)
        chunk.task = asyncio.get_running_loop().create_task(sending, context=chunk.context)
        chunk.task.add_done_callback(partial(self._ended, chunk, replica, now_s))

    def _ended(self, chunk: Chunk, replica: Replica, sent_s: float, task: asyncio.Task[BatchResult]) -> None:
        """What became of a chunk. A callback, since a task may be cancelled before it begins."""
        chunk.task = None
        self._running_chunks -= 1
        self._running_seqs -= chunk.num_seqs
        if task.cancelled():
            if chunk.taken_back:
                self._failed(chunk, replica, Lost(chunk.taken_back))
            else:
                replica.dropped(chunk.num_tokens)
        elif (error := task.exception()) is None:
            now_s = self._clock()
            replica.done(chunk.num_tokens, sent_s, now_s)
            self._metrics.step_ms.observe((now_s - sent_s) * 1e3)
            chunk.job.deliver(chunk.run, task.result(), now_s)
        elif isinstance(error, ReplicaError):
            self._failed(chunk, replica, error)
        else:
            log.error("a chunk could not be sent", exc_info=error)
            replica.dropped(chunk.num_tokens)
            chunk.job.fail(StepFailed(f"replica {replica.name}: {error!r}"))
        self._turn()

    def _failed(self, chunk: Chunk, replica: Replica, error: ReplicaError) -> None:
        """What becomes of a chunk, and of the replica that gave no rows for it."""
        self._metrics.batches_failed += 1
        num_tokens, now_s = chunk.num_tokens, self._clock()
        if isinstance(error, Rejected | Expired | Busy) or _memory_short(error):
            replica.dropped(num_tokens)
        else:
            replica.failed(num_tokens, str(error), at_once=isinstance(error, NotSent))
        if isinstance(error, Rejected):
            chunk.job.fail(StepFailed(f"replica {replica.name}: {error}"))
            return
        if isinstance(error, Expired):
            chunk.job.expire()
            return
        if isinstance(error, Busy | Unavailable):
            replica.pause(error.retry_after_s, now_s)
        if not isinstance(error, Busy | NotSent):
            chunk.attempts += 1
        self._again(chunk, replica, error, now_s)

    def _again(self, chunk: Chunk, replica: Replica, error: ReplicaError, now_s: float) -> None:
        """Let another replica have it, if there is time and it has not failed too often."""
        chunk.tried.add(replica)
        if chunk.job.done:
            return
        if now_s >= chunk.job.deadline_s:
            chunk.job.expire()
        elif chunk.attempts < MAX_ATTEMPTS:
            self._queue.again(chunk)
            self._fail_unserved()
        elif _memory_short(error):
            chunk.job.fail(StepOutOfMemory(f"replica {replica.name}: {error}"))
        else:
            chunk.job.fail(NoReplica(f"replica {replica.name}: {error}", RETRY_AFTER_S))

    def __repr__(self) -> str:
        state = "draining" if self._draining else "running"
        return f"<Balancer {state} {self._queue!r} {self.replicas!r}>"


def _memory_short(error: ReplicaError) -> bool:
    """Whether the chunk was too much for the device, which says nothing of the replica's health."""
    return isinstance(error, Unavailable) and error.out_of_memory
