"""The command-line flags of the scheduler and the options they make. Reads no argv itself."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from scheduler.options import SchedulerOptions

Group: TypeAlias = "argparse._ArgumentGroup"


def add_flags(group: Group) -> None:
    """How much may wait."""
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


def scheduler_options(args: argparse.Namespace, max_batch_tokens: int | None) -> SchedulerOptions:
    """What the parsed flags say; max_batch_tokens: the engine's, if it was chosen by hand.

    Raises:
        ValueError: a limit is not positive.
    """
    defaults = SchedulerOptions()
    ceiling = max_batch_tokens or defaults.max_budget_tokens
    return SchedulerOptions(
        max_waiting_tokens=args.max_waiting_tokens,
        max_waiting_seqs=args.max_waiting_seqs,
        min_budget_tokens=min(defaults.min_budget_tokens, ceiling),
        max_budget_tokens=ceiling,
    )
