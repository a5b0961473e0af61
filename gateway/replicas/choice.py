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
    """The one that will be done with the chunk sooner: by tokens under way, by its times if they differ much.

    Of equals the one that was given less lately, so that one client's requests, which find all of them idle,
    are spread evenly. One that takes ten times as long gets one request in a hundred then: enough to see when
    it no longer does.
    """
    times = first.slowness / second.slowness
    if 1 / SAME_PACE <= times <= SAME_PACE:
        times = 1.0
    if not first.outstanding_chunks and not second.outstanding_chunks:
        return first if first.given(now_s) * times**2 <= second.given(now_s) else second
    cost = (first.outstanding_tokens + num_tokens) * times, first.given(now_s) * times
    other = float(second.outstanding_tokens + num_tokens), second.given(now_s)
    return first if cost <= other else second
