"""The command-line flags of the scheduler and the options they make. Reads no argv itself."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from scheduler.options import SchedulerOptions

Group: TypeAlias = "argparse._ArgumentGroup"


def add_flags(group: Group) -> None:
    """How much may wait, and how long a step may take."""
    defaults = SchedulerOptions()
    group.add_argument(
        "--max-waiting-tokens",
        metavar="TOKENS",
        type=int,
        default=defaults.max_waiting_tokens,
        help="tokens that may wait for the device; beyond that requests get 429 with Retry-After; fewer shed "
        "load earlier, more let latency grow; default: %(default)s",
    )
    group.add_argument(
        "--max-waiting-seqs",
        metavar="N",
        type=int,
        default=defaults.max_waiting_seqs,
        help="the same for sequences; default: %(default)s",
    )
    group.add_argument(
        "--step-timeout-s",
        metavar="SECONDS",
        type=float,
        default=defaults.step_timeout_s,
        help="a step that takes longer is hung: all requests get 503 and the process ends with status 3; "
        "less ends a hung server sooner, but must leave time for a first step, which may compile; default: "
        "%(default)s",
    )


def scheduler_options(args: argparse.Namespace, max_batch_tokens: int | None) -> SchedulerOptions:
    """What the parsed flags say; max_batch_tokens: the engine's, if it was chosen by hand.

    Raises:
        ValueError: a limit is not positive, or no number.
    """
    defaults = SchedulerOptions()
    ceiling = max_batch_tokens or defaults.max_budget_tokens
    return SchedulerOptions(
        max_waiting_tokens=args.max_waiting_tokens,
        max_waiting_seqs=args.max_waiting_seqs,
        min_budget_tokens=min(defaults.min_budget_tokens, ceiling),
        max_budget_tokens=ceiling,
        step_timeout_s=args.step_timeout_s,
    )
