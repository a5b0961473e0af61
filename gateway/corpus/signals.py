"""SIGINT and SIGTERM end a job as errors do: what is half done is undone, what is done stays."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal came. number: which. No Exception, so that nothing on its way takes it for a fault."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def raised() -> Iterator[None]:
    """Inside, a signal raises Stopped in the main thread."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it.

    Raises:
        Stopped: a signal came.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    came: list[int] = []

    def stop(number: int) -> None:
        came.append(number)
        task.cancel()

    before = {number: signal.getsignal(number) for number in _NUMBERS}
    for number in _NUMBERS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if came:
            raise Stopped(came[0]) from None
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
