"""What the HTTP side counts: plain numbers. `exposition.py` writes them, `routes/metrics.py` names them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from typing import ClassVar

from gateway.errors import ErrorKind

# 50 us to 64 s, each bound half as much again as the one before.
SECONDS_BOUNDS = tuple(50e-6 * 1.5**power for power in range(36))
# Where unknown paths and wrong methods are counted: a path that a client made up never becomes a label.
ELSEWHERE = "other"


class Durations:
    """A histogram of seconds over SECONDS_BOUNDS. counts: not cumulated, one more than the bounds."""

    __slots__ = ("counts", "total")

    bounds: ClassVar[tuple[float, ...]] = SECONDS_BOUNDS

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration; 0.3 us."""
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.total += seconds


class RouteMetrics:
    """One route's answers. cancelled: requests whose client left before the answer."""

    __slots__ = ("cancelled", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {200: 0}
        self.seconds = Durations()
        self.cancelled = 0

    def answered(self, status: int, seconds: float) -> None:
        """An answer was made, `seconds` after the request's head was read."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.seconds.observe(seconds)


class GatewayMetrics:
    """All counters. routes: by the first of a route's paths; outstanding: requests being worked on now.

    last_error_s: Unix time of the newest error of each kind that there was.
    """

    def __init__(self) -> None:
        self.routes: dict[str, RouteMetrics] = {ELSEWHERE: RouteMetrics()}
        self.errors: Counter[ErrorKind] = Counter(dict.fromkeys(ErrorKind, 0))
        self.last_error_s: dict[ErrorKind, float] = {}
        self.tokenization = Durations()
        self.outstanding = 0

    def count_error(self, kind: ErrorKind) -> None:
        """An answer was an error."""
        self.errors[kind] += 1
        self.last_error_s[kind] = time.time()

    def route(self, path: str) -> RouteMetrics:
        """The counters of the route that is known by `path`."""
        return self.routes.setdefault(path, RouteMetrics())
