"""Above how many tokens a CUDA graph gains nothing, found by trying. The caller runs and times."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Launching eagerly must cost the caller's loop less than this part of the time the device is busy: then the
# launches hide behind the device, and the loop has three quarters of its time for requests.
LAUNCH_SHARE = 0.25
# Fewer tokens may go through all layers in one launch (up to 512, rose.kernels.cuda), which hides as well,
# and more in hundreds that do not.
FIRST_TOKENS = 1024


class ForwardTime(NamedTuple):
    """Of one eager forward: until its last kernel is enqueued, and until the device is done. Seconds."""

    launch_s: float
    total_s: float


def inflection_point(time_forward: Callable[[int], ForwardTime], max_tokens: int) -> int:
    """The smallest tried number of tokens whose eager launches hide behind the device, or max_tokens.

    Tries FIRST_TOKENS and its doublings. A batch of more tokens than the answer is better run eagerly.
    """
    num_tokens = FIRST_TOKENS
    while num_tokens < max_tokens:
        time = time_forward(num_tokens)
        if time.launch_s <= LAUNCH_SHARE * time.total_s:
            return num_tokens
        num_tokens *= 2
    return max_tokens
