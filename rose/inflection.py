"""Above how many tokens a CUDA graph gains nothing, found by trying. The caller runs and times."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Launching eagerly must cost the caller's loop less than this part of the time the device is busy: then the
# launches hide behind the device, and the loop has three quarters of its time for requests.
LAUNCH_SHARE = 0.25


class ForwardTime(NamedTuple):
    """Of one eager forward: until its last kernel is enqueued, and until the device is done. Seconds."""

    launch_s: float
    total_s: float


def inflection_point(time_forward: Callable[[int], ForwardTime], first_tokens: int, max_tokens: int) -> int:
    """The smallest tried number of tokens whose eager launches hide behind the device, or max_tokens.

    Tries first_tokens and its doublings. A batch of more tokens than the answer is better run eagerly.
    """
    num_tokens = first_tokens
    while num_tokens < max_tokens:
        time = time_forward(num_tokens)
        if time.launch_s <= LAUNCH_SHARE * time.total_s:
            return num_tokens
        num_tokens *= 2
    return max_tokens
