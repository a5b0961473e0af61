"""When the next batch should be launched, and how large: arithmetic on the queue's counts."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from rose.batch import EngineInfo
from scheduler.cost_model import CostModel
from scheduler.inflight import InFlight
from scheduler.options import SchedulerOptions
from scheduler.queue import SequenceQueue


class BatchSize(NamedTuple):
    """How many tokens of those that wait make the next batch.

    apart_tokens: jobs of more are not begun in it behind others; None: any is.
    """

    tokens: int
    apart_tokens: int | None = None


class Pacer:
    """The two decisions of continuous batching, from the cost model and the limits.

    cost: learns from the steps that the batcher reports to it.
    """

    def __init__(self, info: EngineInfo, options: SchedulerOptions) -> None:
        self.cost = CostModel(
            floor=options.min_budget_tokens,
            ceiling=min(options.max_budget_tokens, info.max_batch_tokens),
            tolerance=options.throughput_tolerance,
            seed=options.cost_points,
        )
        self._least_tokens = min(options.min_budget_tokens, info.max_batch_tokens, options.max_budget_tokens)
        self._info = info
        self._options = options

    def budget(self, queue: SequenceQueue) -> int:
        """Tokens that a batch needs for (nearly) full throughput, of sequences like those that wait."""
        return self.cost.budget(max(1, queue.num_tokens), max(1, queue.num_seqs))

    def full(self, queue: SequenceQueue) -> bool:
        """Whether a whole batch waits."""
        if queue.num_seqs >= self._info.max_batch_seqs:
            return True
        # Asking the model costs 5 µs, and no budget is below the least.
        return queue.num_tokens >= self._least_tokens and queue.num_tokens >= self.budget(queue)

    def next_batch(self, queue: SequenceQueue) -> BatchSize:
        """The budget, evened out over the batches that the queue makes, so that no small one is left over.

        5 sequences of 512 tokens and a budget of 2048: one step of 2560 takes 5.1 ms on an H200 (0.6B model),
        while 2048 and then 512 take 4.2 + 1.6 ms.

        A large job is not parted where the engine takes it whole: nobody passes it, so those behind it have
        their turn no sooner for its parts. If it is larger than any batch is meant to be, it does not begin
        in the batch of those before it either, who would wait for that much of it.
        """
        # The model costs 15 µs, or three times that with cold caches; a job that is taken whole needs none.
        tokens, most = queue.num_tokens, self._info.whole_job_tokens
        if tokens <= self._least_tokens or queue.first_job_tokens == tokens <= most:
            return BatchSize(tokens)
        budget = self.budget(queue)
        nearest = max(1, round(queue.num_tokens / budget))
        other = nearest - 1 if nearest * budget > queue.num_tokens else nearest + 1
        gain = 1 - self._options.throughput_tolerance
        if other and self._drain_ms(queue, other) < gain * self._drain_ms(queue, nearest):
            nearest = other
        even = min(ceil(queue.num_tokens / nearest), self._info.max_batch_tokens)
        if not self._info.whole_job_tokens:
            return BatchSize(even)
        return BatchSize(max(even, self._of_first_job(queue)), self._options.max_budget_tokens)

    def _of_first_job(self, queue: SequenceQueue) -> int:
        """Tokens of the job at the front, or an even part of them if a step takes no more of one job."""
        tokens, most = queue.first_job_tokens, self._info.whole_job_tokens
        return ceil(tokens / ceil(tokens / most)) if tokens else 0

    def _drain_ms(self, queue: SequenceQueue, batches: int) -> float:
        """What the queue takes in so many batches of one size."""
        return batches * self.cost.predict(ceil(queue.num_tokens / batches), ceil(queue.num_seqs / batches))

    def launch_in_s(self, queue: SequenceQueue, in_flight: InFlight, now_s: float) -> float:
        """Seconds for which later arrivals may still join the next batch; launch it when this is not above 0.

        A step launched earlier than just before the engine runs dry would only shut out who comes later.
        """
        if not in_flight or self.full(queue):
            return 0.0
        options = self._options
        lead_s = options.launch_lead_s + options.launch_lead_share * in_flight.head.predicted_s
        return in_flight.end_s - lead_s - now_s
