"""How long a request may wait for its start on the device."""

from __future__ import annotations

import math
import time

import msgspec

from gateway.errors import ApiError, ErrorKind, shown
from scheduler.errors import DeadlineExpired

HEADER = "x-request-timeout-ms"


class Deadline(msgspec.Struct, frozen=True):
    """started_s: when the request's head was read, on time.perf_counter. limit_s: seconds from then."""

    started_s: float
    limit_s: float

    def left_s(self) -> float:
        """Seconds until it passes.

        Raises:
            DeadlineExpired: it has passed.
        """
        left_s = self.started_s + self.limit_s - time.perf_counter()
        if left_s <= 0:
            raise DeadlineExpired(self.limit_s)
        return left_s


def read_deadline(header: str | None, started_s: float, most_s: float | None) -> Deadline | None:
    """The deadline of a request: what its header says, but no later than the server's own; None: none.

    Raises:
        ApiError: INVALID_VALUE, when the header is no positive number of milliseconds.
    """
    if header is None:
        return None if most_s is None else Deadline(started_s, most_s)
    try:
        asked_s = float(header) / 1e3
    except ValueError:
        asked_s = math.nan
    if not 0 < asked_s < math.inf:
        message = f"{HEADER} is {shown(header)}; give milliseconds, more than 0"
        raise ApiError(ErrorKind.INVALID_VALUE, message, param=HEADER)
    return Deadline(started_s, asked_s if most_s is None else min(asked_s, most_s))
