"""How much may wait for the device at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """First come, first served. limit: tokens that may be held; one that is larger passes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def held(self, tokens: int) -> AsyncIterator[None]:
        """Wait until so many fit, and hold them inside the block."""
        async with self._turn:
            while self._held and self._held + tokens > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self._held += tokens
        try:
            yield
        finally:
            self._held -= tokens
            self._freed.set()
