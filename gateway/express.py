"""A shorter way through HTTP for plain requests: aiohttp's connection, whose parser and writer they pass by.

There is one pipeline: what answers is the same `Work` that aiohttp's handlers call, with the same headers.
Only framing differs, which costs aiohttp half of all that a small request takes of the loop: `plain_head.py`
reads the head, or finds the one before it repeated, and head and body of the answer leave in one write.
Whatever is not plain goes to aiohttp byte for byte as it came, and the connection stays with it from then on:
nobody but its parser knows where in a message it is.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web

from gateway.connection import ClientPatience, Connection
from gateway.drain import Drain
from gateway.exchange import PlainRequest, PlainRoutes, Reply
from gateway.media import Media, request_media
from gateway.plain_head import PlainHead, read_plain_head
from gateway.strays import Strays

# A body may come in pieces: a request then counts from its last one. What takes longer, or is larger, is
# better gathered by aiohttp, which has a timer for bodies and asks for the key before it takes much.
_HOLD_S = 0.05
_HOLD_BYTES = 1 << 20
# Of what a client sends before it has its answer; then its connection is read no more until it has.
_MAX_BEHIND_BYTES = 1 << 16
# A larger one would take long to answer once more, see `gateway.rehearsal`.
_MAX_KEPT_BYTES = 1 << 16
# A smaller body is copied behind its head: one buffer to send instead of two.
_MAX_COPIED_BYTES = 1 << 16


class ExpressConnection(Connection):
    """routes: what plain requests may ask for; None: all go to aiohttp, as they do while it logs requests.

    drain: lets in a request when its head is here; the rest of it may come in a shutdown.
    """

    __slots__ = (
        "_arriving",
        "_drain",
        "_express",
        "_head",
        "_head_bytes",
        "_held",
        "_hold_timer",
        "_kept",
        "_missing",
        "_routes",
        "_running",
    )

    def __init__(
        self,
        server: web.Server,
        patience: ClientPatience,
        strays: Strays,
        routes: PlainRoutes | None,
        drain: Drain,
        **settings: Any,
    ) -> None:
        super().__init__(server, patience, strays, **settings)
        self._drain = drain
        self._arriving = False  # a request was let in that nobody works on yet
        self._routes = routes or PlainRoutes({}, 0)
        self._express = routes is not None and not self._logging_enabled
        self._head: PlainHead | None = None
        self._head_bytes = b""
        self._held: list[bytes] = []
        self._missing = 0  # bytes of the body that `_held` begins
        self._hold_timer: asyncio.TimerHandle | None = None
        self._kept: PlainRequest | None = None
        self._running: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        """Some bytes came: a request, a part of one, or several."""
        if not self._express:
            super().data_received(data)
        elif self._force_close or self._close:
            return
        elif self._running is not None:
            self._hold_behind(data)
        elif self._held:
            self._gather(data)
        else:
            self._begin(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone, and with it the wish for an answer."""
        super().connection_lost(exc)
        if self._arriving:
            self._arriving = False
            self._drain.gone()
        self._held.clear()
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        if self._running is not None:
            self._running.cancel()

    def _begin(self, data: bytes) -> None:
        head = self._head
        if head is None or not data.startswith(self._head_bytes):
            head = self._read_head(data)
        missing = 0 if head is None else head.size + head.length - len(data)
        if head is not None and missing == 0:
            self._start(head, data[head.size :])
            return
        self._held.append(data)
        # In a shutdown it is refused now, not when its body is here: aiohttp has the door asked at once.
        if head is None or not 0 < missing <= _HOLD_BYTES or self._drain.begun:
            self._hand_over()
        else:
            self._missing = missing
            self._arriving = True
            self._drain.let_in()
            self._hold_timer = self._loop.call_later(_HOLD_S, self._hand_over)

    def _read_head(self, data: bytes) -> PlainHead | None:
        """Remembers it: clients mostly send the same head again."""
        head = read_plain_head(data)
        if head is None or head.path not in self._routes.works or head.length > self._routes.max_body_bytes:
            return None
        self._head, self._head_bytes = head, data[: head.size]
        return head

    def _gather(self, data: bytes) -> None:
        self._held.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        head = self._head
        if head is None or self._missing < 0:
            self._hand_over()
            return
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        self._held[0] = self._held[0][head.size :]
        body = b"".join(self._held)
        self._held.clear()
        self._start(head, body)

    def _hand_over(self) -> None:
        """From here on the connection is aiohttp's."""
        self._express = False
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        held, self._held = self._held, []
        for data in held:
            super().data_received(data)

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        """Work on what aiohttp has parsed; the first such request may be one that was handed over."""
        self._work_begins()
        return await super()._handle_request(request, start_time, request_handler)

    def _work_begins(self) -> None:
        """On the request that was let in, if there is one. Called in the task that asks the door for it."""
        if self._arriving:
            self._arriving = False
            self._drain.work_begins()

    def _hold_behind(self, data: bytes) -> None:
        self._held.append(data)
        if not self._buffer_paused and sum(map(len, self._held)) > _MAX_BEHIND_BYTES:
            self._pause_reading_for_buffer()

    def _start(self, head: PlainHead, body: bytes) -> None:
        self._request_count += 1
        if self._manager is not None:
            self._manager.requests_count += 1
        self._request_in_progress = True
        if self._routes.keeps_newest:
            self._keep(head, body)
        task = _task(self._answer(head, body), self._loop)
        if not task.done():
            self._running = task

    def _keep(self, head: PlainHead, body: bytes) -> None:
        """Until it is answered, or there is a newer one."""
        media = request_media(head.headers.get(hdrs.CONTENT_TYPE))
        if media is Media.MSGPACK and len(body) <= _MAX_KEPT_BYTES:
            self._kept = self._routes.newest = PlainRequest(self._head_bytes, body)

    async def _answer(self, head: PlainHead, body: bytes) -> None:
        async def whole() -> bytes:
            return body

        self._work_begins()
        try:
            reply = await self._routes.works[head.path](head.headers, whole)
            self._write(reply)
            if self._paused:
                await self._drain_helper()
            if reply.closes:
                self.close()
        except ConnectionError:  # the client left while it had yet to read
            pass
        except Exception as error:
            self.log_exception("an answer could not be written", exc_info=error)
            self.force_close()
        finally:
            self._ended()

    def _write(self, reply: Reply) -> None:
        if self.transport is None:
            return
        lines = "".join([f"{name}: {value}\r\n" for name, value in reply.headers])
        length, date = len(reply.body), _date(int(time.time()))
        closes = "Connection: close\r\n" if reply.closes else ""
        head = f"{_status_line(reply.status)}{lines}Content-Length: {length}\r\n{date}{closes}\r\n".encode()
        if length <= _MAX_COPIED_BYTES:
            self.transport.write(head + reply.body)
        else:
            self.transport.writelines((head, reply.body))

    def _ended(self) -> None:
        """As aiohttp after an answer: wake a shutdown that waits for it, close, or wait for the next."""
        self._running = None
        self._request_in_progress = False
        if self._kept is not None:
            if self._routes.newest is self._kept:
                self._routes.newest = None
            self._kept = None
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        if self._force_close or self.transport is None:
            return
        if self._close:
            self.transport.close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(
                self._next_keepalive_close_time, self._process_keepalive
            )
        if self._buffer_paused:
            self._resume_reading_for_buffer()
        if len(self._held) == 1:
            self._begin(self._held.pop())
        elif self._held:
            self._hand_over()

    def _process_keepalive(self) -> None:
        """Close the connection if it has been idle for long; aiohttp sees only what it parsed itself."""
        if self._running is None and not self._held:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None  # armed again with the answer, by `_ended` or by aiohttp


def _task(coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
    """Runs at once up to its first wait, where Python can do that; before 3.12, from the next turn on."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, eager_start=True)
    return loop.create_task(coroutine)


@lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    return f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\n"


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return f"{hdrs.DATE}: {formatdate(second, usegmt=True)}\r\n"
