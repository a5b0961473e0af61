"""Which replica a chunk goes to: the better of two at random.

Looking at all of them would send what comes at one moment to the same one, and gateways beside each other
would do so together. Source: Mitzenmacher 2001, "The power of two choices in randomized load balancing".
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from gateway.replicas.replica import SAME_PACE, Replica


def choose(replicas: Sequence[Replica], num_tokens: int, now_s: float, rng: random.Random) -> Replica | None:
    """The replica for a chunk of `num_tokens`; None: none has room now."""
    if len(replicas) > 1:
        first, second = rng.sample(replicas, 2)
        if first.has_room(num_tokens, now_s) and second.has_room(num_tokens, now_s):
            return better(first, second, num_tokens, now_s)
    roomy = [replica for replica in replicas if replica.has_room(num_tokens, now_s)]
    if len(roomy) < 2:
        return roomy[0] if roomy else None
    first, second = rng.sample(roomy, 2)
    return better(first, second, num_tokens, now_s)


def better(first: Replica, second: Replica, num_tokens: int, now_s: float) -> Replica:
    """The one that will be done with the chunk sooner: by tokens under way, and by pace if that differs much.

    Of equals the one that was given less so far, so that one client's requests, which find all of them idle,
    are spread evenly.
    """
    paces = first.pace(now_s), second.pace(now_s)
    slowness = [1.0, 1.0]
    if min(paces) > 0:
        for index in (0, 1):
            times = paces[index] / paces[1 - index]
            slowness[index] = times if times > SAME_PACE else 1.0
    costs = [
        ((replica.outstanding_tokens + num_tokens) * slow, replica.given(now_s) * slow)
        for replica, slow in zip((first, second), slowness, strict=True)
    ]
    return first if costs[0] <= costs[1] else second
