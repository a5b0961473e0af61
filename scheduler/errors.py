"""The closed set of ways in which a job ends without vectors. `gateway` gives each a status code.

Each job gets an exception object of its own: one shared by many waiters would collect their tracebacks.
"""

from __future__ import annotations

from dataclasses import dataclass


class SchedulerError(Exception):
    """Base of the set."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waited, and how much may wait, when a job was refused."""

    waiting_tokens: int
    waiting_seqs: int
    max_waiting_tokens: int
    max_waiting_seqs: int


class QueueFull(SchedulerError):  # noqa: N818, the name says what happened
    """Too much waits already; nothing of the job was accepted.

    retry_after_s: how long a job accepted now would wait, at the measured rate.
    """

    def __init__(self, num_tokens: int, num_seqs: int, backlog: Backlog, retry_after_s: float) -> None:
        super().__init__(
            f"{num_tokens} tokens in {num_seqs} sequences do not fit beside {backlog.waiting_tokens} waiting"
            f" tokens in {backlog.waiting_seqs} sequences; at most {backlog.max_waiting_tokens} tokens and"
            f" {backlog.max_waiting_seqs} sequences may wait; retry in {retry_after_s:.3g} s"
        )
        self.backlog = backlog
        self.retry_after_s = retry_after_s


class DeadlineExpired(SchedulerError):  # noqa: N818
    """The job's deadline passed while a part of it still waited; that part never reached the engine."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(f"not started within {deadline_s:.3g} s")
        self.deadline_s = deadline_s


class StepFailed(SchedulerError):  # noqa: N818
    """The engine failed in a batch that held a part of this job; other jobs are not affected."""


class StepOutOfMemory(StepFailed):
    """The device had too little memory even for half of the batch (or for a sequence alone)."""


class EngineDead(SchedulerError):  # noqa: N818
    """The engine can run nothing more; only a restart of the process helps."""


class Draining(SchedulerError):  # noqa: N818
    """The server is shutting down: the job was not accepted, or not done before the drain ended."""


class NoReplica(SchedulerError):  # noqa: N818
    """Of several engines none could run the job: none serves, or those that were asked failed.

    retry_after_s: when one may serve again.
    """

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(f"{reason}; retry in {retry_after_s:.3g} s")
        self.retry_after_s = retry_after_s
