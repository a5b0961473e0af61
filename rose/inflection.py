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
    """The smallest tried number of tokens from which on eager launches hide behind the device, or max_tokens.

    Tries first_tokens and its doublings, the largest first: few tokens may go through all layers in one
    launch, which hides as well, and more in hundreds that do not. A batch of more tokens than the answer is
    better run eagerly.
    """
    tried = [first_tokens << power for power in range(max_tokens.bit_length())]
    answer = max_tokens
    for num_tokens in sorted((one for one in tried if one < max_tokens), reverse=True):
        time = time_forward(num_tokens)
        if time.launch_s > LAUNCH_SHARE * time.total_s:
            break
        answer = num_tokens
    return answer
