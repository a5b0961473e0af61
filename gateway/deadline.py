"""How long a request may wait for its start on the device."""

from __future__ import annotations

import math
import time

import msgspec

from gateway.errors import ApiError, ErrorKind, shown

HEADER, FLAG = "x-request-timeout-ms", "--request-timeout-s"


class Deadline(msgspec.Struct, frozen=True):
    """started_s: when the request's head was read, on time.perf_counter. limit_s: seconds from then.

    origin: who set the limit: HEADER or FLAG.
    """

    started_s: float
    limit_s: float
    origin: str = FLAG

    def left_s(self) -> float:
        """Seconds until it passes.

        Raises:
            ApiError: DEADLINE_EXPIRED, when it has passed while the body came and its text became tokens.
        """
        left_s = self.started_s + self.limit_s - time.perf_counter()
        if left_s <= 0:
            raise self.expired("before its tokens were there")
        return left_s

    def expired(self, phase: str) -> ApiError:
        """What its client is told when it has passed; phase: when that was."""
        message = (
            f"the {self.limit_s * 1e3:g} ms that the request had to be started in ({self.origin}) were over"
            f" {phase}; nothing that still waited was computed"
        )
        return ApiError(ErrorKind.DEADLINE_EXPIRED, message)


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
    if most_s is not None and most_s < asked_s:
        return Deadline(started_s, most_s)
    return Deadline(started_s, asked_s, HEADER)
