"""Counters and histograms of the scheduler: plain numbers, no format. `gateway` renders them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.errors import DeadlineExpired, QueueFull, SchedulerError

# 50 us to 64 s; a quantile read from such buckets is off by half at most.
_MS_BOUNDS = tuple(0.05 * 1.5**power for power in range(36))
_TOKEN_BOUNDS = tuple(2**power for power in range(4, 18))
_SEQ_BOUNDS = tuple(2**power for power in range(11))


class Histogram:
    """Counts of values <= each of `bounds`, and of those above the last; not cumulated.

    counts: one more than bounds. total: the sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def __repr__(self) -> str:
        return f"<Histogram of {self.count}, mean {self.total / max(1, self.count):.3g}>"


def _ms_histogram() -> Histogram:
    return Histogram(_MS_BOUNDS)


@dataclass(slots=True)
class SchedulerMetrics:
    """Gauges as of the moment they are read; everything else counts since the start.

    accepted jobs = completed + failed + expired + cancelled + those not done. failed: ended by an error other
    than an expired deadline. refused_full, refused_closed: not accepted (QueueFull; Draining or EngineDead).
    step_ms: device time of a batch. queue_ms: a job's wait, of completed jobs.
    """

    waiting_seqs: int = 0
    waiting_tokens: int = 0
    running_batches: int = 0
    running_seqs: int = 0
    token_budget: int = 0
    tokens_per_s: float = 0.0
    accepted: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    refused_full: int = 0
    refused_closed: int = 0
    batches: int = 0
    batches_failed: int = 0
    batches_halved: int = 0
    seqs: int = 0
    tokens: int = 0
    step_ms: Histogram = field(default_factory=_ms_histogram)
    queue_ms: Histogram = field(default_factory=_ms_histogram)
    tokens_per_batch: Histogram = field(default_factory=lambda: Histogram(_TOKEN_BOUNDS))
    seqs_per_batch: Histogram = field(default_factory=lambda: Histogram(_SEQ_BOUNDS))

    def count_launch(self, num_tokens: int, num_seqs: int) -> None:
        """A batch was given to the engine."""
        self.batches += 1
        self.tokens += num_tokens
        self.seqs += num_seqs
        self.tokens_per_batch.observe(num_tokens)
        self.seqs_per_batch.observe(num_seqs)

    def count_refusal(self, error: SchedulerError) -> None:
        """A job was not accepted."""
        if isinstance(error, QueueFull):
            self.refused_full += 1
        else:
            self.refused_closed += 1

    def count_error(self, error: SchedulerError) -> None:
        """An accepted job ended in `error`."""
        if isinstance(error, DeadlineExpired):
            self.expired += 1
        else:
            self.failed += 1
