"""A shutdown as clients see it: new work is refused, what came before it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar

from aiohttp import web

from gateway.errors import ApiError, ErrorKind
from gateway.metrics import GatewayMetrics

# Between two looks at what is still being worked on; a shutdown takes so much longer.
_LOOK_S = 0.01
# Of the task in which work on a request begins: it was let in before the shutdown that has begun since.
_LET_IN: ContextVar[bool] = ContextVar("let_in", default=False)


class Drain:
    """Whether a shutdown has begun. metrics: knows how many requests are being worked on."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._ending: list[Callable[[], None]] = []
        self.begun = False

    def when_begun(self, end: Callable[[], None]) -> None:
        """Call `end` when a shutdown begins: for what is open and no work."""
        self._ending.append(end)

    def check(self) -> None:
        """Let new work pass.

        Raises:
            ApiError: UNAVAILABLE, once a shutdown has begun; the connection closes.
        """
        if not self.begun:
            return
        if not _LET_IN.get():
            raise ApiError(ErrorKind.UNAVAILABLE, "the server is shutting down", closes=True)
        _LET_IN.set(False)  # what follows in this task is another request

    def let_in(self) -> None:
        """Count a request whose head has come; work on it begins when there is more of it."""
        self._metrics.outstanding += 1

    def gone(self) -> None:
        """Count it no more: work on it will never begin."""
        self._metrics.outstanding -= 1

    def work_begins(self) -> None:
        """Leave it to who works on it to count it, and to `check` in this task, which lets it pass."""
        self._metrics.outstanding -= 1
        if self.begun:
            _LET_IN.set(True)

    async def run(self, limit_s: float) -> None:
        """Begin, and wait until no request is being worked on, `limit_s` seconds at most.

        A request counts from its head on: it may still be tokenised, or send its body.
        """
        self.begun = True
        for end in self._ending:
            end()
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + limit_s
        # An event would have to be kept by every request, for the one moment at which somebody waits.
        while self._metrics.outstanding and loop.time() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(min(_LOOK_S, max(0.0, ends_s - loop.time())))


DRAIN = web.AppKey("drain", Drain)
