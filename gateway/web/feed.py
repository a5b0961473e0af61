"""Who looks at the server: bounded in number, fed by one task for all, dropped when they read too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.errors import ApiError, ErrorKind, retry_headers

# Between two updates. Half as often as people would notice, and half the cost.
PERIOD_S = 1.0
MAX_LISTENERS = 16
# Updates that one who reads nothing may be behind.
MAX_BEHIND = 8
_RETRY_S = 30.0


class Source(Protocol):
    """What is told, as bytes of server-sent events."""

    def whole(self) -> bytes:
        """All of it, for one who has just come."""
        ...

    def changes(self) -> bytes:
        """What is new since the last call."""
        ...


class Listener:
    """One open stream. Iterating gives what is to be sent, and ends when the feed does.

    on_drop: ends the connection of one who reads too slowly.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._unsent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.on_drop: Callable[[], None] = lambda: None

    def __aiter__(self) -> Listener:
        return self

    async def __anext__(self) -> bytes:
        update = await self._unsent.get()
        if update is None:
            raise StopAsyncIteration
        return update

    def tell(self, update: bytes) -> None:
        """Have it sent, or end this stream if too much already waits."""
        if self._unsent.qsize() >= MAX_BEHIND:
            self.leave()
            self.on_drop()
        else:
            self._unsent.put_nowait(update)

    def end(self) -> None:
        """Nothing follows what waits."""
        self._unsent.put_nowait(None)

    def leave(self) -> None:
        """Listen no more. May be called again."""
        self._feed.remove(self)


class Feed:
    """Asks `source` every PERIOD_S while anyone listens, and not at all while nobody does."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def listeners(self) -> int:
        """How many there are."""
        return len(self._listeners)

    def join(self) -> Listener:
        """A new stream, which begins with the whole.

        Raises:
            ApiError: OVERLOADED, when there are MAX_LISTENERS.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            message = f"{MAX_LISTENERS} pages watch this server, as many as it lets; retry in {_RETRY_S:g} s"
            raise ApiError(ErrorKind.OVERLOADED, message, headers=retry_headers(_RETRY_S))
        listener = Listener(self)
        listener.tell(self._source.whole())
        self._listeners.add(listener)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="dashboard-feed")
        return listener

    def remove(self, listener: Listener) -> None:
        """It listens no more."""
        self._listeners.discard(listener)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all streams."""
        for listener in list(self._listeners):
            listener.end()
            listener.leave()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            update = self._source.changes()
            for listener in list(self._listeners):
                listener.tell(update)
