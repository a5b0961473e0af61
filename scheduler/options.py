"""How the scheduler is set up; built once by `server.py`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from scheduler.cost_model import CostPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Limits and trade-offs; the engine's own limits hold besides.

    max_in_flight: batches launched and not finished; 2 keeps the device fed while the loop handles a result.
    max_waiting_tokens, max_waiting_seqs: above these a job is refused with QueueFull. 4 million tokens are
        8 s of a 0.6B model on an H200 and 16 MiB of memory.
    min_budget_tokens, max_budget_tokens: bounds of the learned token budget of a batch.
    throughput_tolerance: gain in throughput for which a longer batch is not worth its latency.
    launch_lead_s, launch_lead_share: how long before the predicted end of a step its successor is launched: a
        fixed part that covers the launch itself, and a share of the prediction that covers its error.
    step_timeout_s: a step that runs longer is hung, and the engine dead. Must cover compiling, at first.
    cost_points: measured step times to start from; learned anyway from the steps that run.

    Raises:
        ValueError: a limit is not positive, or the budget's bounds are crossed.
    """

    max_in_flight: int = 2
    max_waiting_tokens: int = 4_194_304
    max_waiting_seqs: int = 65_536
    min_budget_tokens: int = 512
    max_budget_tokens: int = 16_384
    throughput_tolerance: float = 0.02
    launch_lead_s: float = 0.0003
    launch_lead_share: float = 0.05
    step_timeout_s: float = 120.0
    cost_points: tuple[CostPoint, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "max_waiting_tokens", "max_waiting_seqs", "min_budget_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_budget_tokens < self.min_budget_tokens:
            raise ValueError(
                f"max_budget_tokens is {self.max_budget_tokens}; it must be at least"
                f" min_budget_tokens, {self.min_budget_tokens}"
            )
        if not 0 < self.step_timeout_s < inf:
            raise ValueError(f"step_timeout_s is {self.step_timeout_s}; it must be above 0, and finite")
