"""The connections of one client: opened when all are busy, kept for the next request, watched for silence."""

from __future__ import annotations

import asyncio
from time import perf_counter

from loadgen.http1 import Connection, connect

WATCH_S = 0.5


class Pool:
    """timeout_s: how long a request may take."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []

    def __repr__(self) -> str:
        return f"Pool({self._host}:{self._port}, open={len(self._all)}, idle={len(self._idle)})"

    async def take(self) -> Connection:
        """A usable connection, the one used last if any is idle.

        Raises:
            OSError: nothing listens.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._all.discard(connection)
        return await self._open()

    def put(self, connection: Connection) -> None:
        """Done with it."""
        if connection.usable:
            self._idle.append(connection)
        else:
            self._all.discard(connection)

    async def grow(self, count: int) -> None:
        """See that `count` are idle."""
        while len(self._idle) < count:
            self._idle.append(await self._open())

    async def watch(self) -> None:
        """Ends requests that take too long, until cancelled. One timer for all: one a request costs 2 µs."""
        while True:
            await asyncio.sleep(WATCH_S)
            late_s = perf_counter() - self._timeout_s
            for connection in list(self._all):
                if 0.0 < connection.sent_s < late_s:
                    connection.abort(f"no answer in {self._timeout_s:g} s")
                    self._all.discard(connection)

    def close(self) -> None:
        """Close them all."""
        for connection in self._all:
            connection.abort()
        self._all.clear()
        self._idle.clear()

    async def _open(self) -> Connection:
        connection = await connect(self._host, self._port)
        self._all.add(connection)
        return connection
