"""When the requests of an open loop are due, and an alarm that wakes a loop at a time to 0.1 ms."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Iterator
from time import perf_counter
from types import TracebackType

import numpy as np

from loadgen.plan import LoadgenError, Pacing, Stream

BLOCK = 1024
CLOCK_MONOTONIC = 1
TFD_NONBLOCK, TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
# Shorter waits are not worth a timer: setting one and being woken takes about this long.
SHORTEST_S = 0.00005


def arrivals(stream: Stream, index: int, seed: int) -> Iterator[float]:
    """Seconds after the start at which process `index` of an open loop sends, rising, without end.

    Poisson arrivals split over processes are Poisson again, at a share of the rate; constant ones take turns.
    """
    if stream.pacing is Pacing.CONSTANT:
        for number in range(index, sys.maxsize, stream.processes):
            yield number / stream.rate
    elif stream.pacing is Pacing.POISSON:
        rng = np.random.default_rng([seed, index, 1])
        at_s = 0.0
        while True:
            for gap_s in rng.exponential(stream.processes / stream.rate, BLOCK):
                at_s += float(gap_s)
                yield at_s
    else:
        raise LoadgenError(f"{stream.pacing.value} is no open loop")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Wakes a coroutine at a time, through a timerfd: uvloop's own timers are good to 1 ms only.

    Where there is no timerfd (not Linux) it is as good as the loop's timers.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._libc: ctypes.CDLL | None = None
        self._rung: asyncio.Future[None] | None = None

    def __enter__(self) -> Alarm:
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
            asyncio.get_running_loop().add_reader(self._fd, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)

    async def wait_until(self, at_s: float) -> None:
        """Returns at `at_s` (perf_counter), or soon if that has passed; the loop turns at least once."""
        left_s = at_s - perf_counter()
        if left_s <= SHORTEST_S:
            await asyncio.sleep(0)
        elif self._libc is None:
            await asyncio.sleep(left_s)
        else:
            self._rung = asyncio.get_running_loop().create_future()
            self._set(left_s)
            await self._rung

    def _set(self, left_s: float) -> None:
        seconds, part = divmod(left_s, 1.0)
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(int(seconds), max(1, int(part * 1e9))))
        if self._libc is not None and self._libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)
