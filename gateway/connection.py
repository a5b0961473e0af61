"""One client's connection: aiohttp's protocol, with a limit on how slow heads are, and our words for errors.

What is private to aiohttp and used here was read in 3.14.5; tests over raw sockets would tell of a change.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import StreamReader, hdrs, web
from aiohttp.http import HttpProcessingError, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from gateway.strays import Strays


@dataclass(frozen=True, slots=True)
class ClientPatience:
    """What a connection waits for. head_s: seconds for a head, from its first byte.

    idle_s: seconds for that byte, and for a client to take a part of its answer.
    """

    head_s: float = 30.0
    idle_s: float = 75.0


_HEAD_END = b"\r\n\r\n"
CLIENT_PATIENCE = web.AppKey("client_patience", ClientPatience)


class Connection(RequestHandler):
    """Tells what is no HTTP in our words, and drops clients that send a head or take an answer too slowly."""

    __slots__ = (
        "_answer_timer",
        "_behind",
        "_body",
        "_head_timer",
        "_last",
        "_length",
        "_patience",
        "_strays",
    )

    def __init__(self, server: web.Server, patience: ClientPatience, strays: Strays, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._patience = patience
        self._strays = strays
        self._head_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # of the newest request, until all of it came
        self._length: int | None = None  # of the newest request's body; None: it is chunked
        self._behind: int | None = None  # bytes that came behind its head; None: that is not known
        self._last = b""  # those that came last, as many as end a head

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone; the timers would keep all of it in memory."""
        self._stop_head_timer()
        self._stop_answer_timer()
        self._body = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it comes."""
        super().pause_writing()
        self._watch_answer(sys.maxsize)

    def resume_writing(self) -> None:
        """It has taken nearly all."""
        self._stop_answer_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Bytes came. A head is parsed by itself: aiohttp forgets it if what is behind it is broken."""
        end = data.find(_HEAD_END, 0, self.max_field_size) + len(_HEAD_END)
        if len(_HEAD_END) <= end < len(data):
            self._parse(data[:end])
            data = data[end:]
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        seen = self._request_count
        super().data_received(data)
        self._last = (self._last + data[-len(_HEAD_END) :])[-len(_HEAD_END) :]
        if self._request_count != seen:
            self._stop_head_timer()
            message, body = self._messages[-1]
            self._count_from(message)
            self._watch_body(message, body)
            return
        if self._body is not None and self._body.is_eof():
            self._body = None
        if self._behind is not None:
            self._behind += len(data)
        if self._awaits_head():
            self._start_head_timer()

    def _count_from(self, message: RawRequestMessage | _ErrInfo) -> None:
        """Bytes are counted from this head on, if it is the last that came."""
        self._behind = None
        if not isinstance(message, _ErrInfo) and self._last == _HEAD_END:
            self._behind = 0
            self._length = None if message.chunked else int(message.headers.get(hdrs.CONTENT_LENGTH, 0))

    def _head_begun(self, request: web.BaseRequest) -> bool:
        """Whether bytes of a later head came while `request` was under way. False where that is not known."""
        if self._behind is None or self._messages or not request.content.is_eof():
            return False
        return self._last != _HEAD_END if self._length is None else self._behind > self._length

    def _awaits_head(self) -> bool:
        """Whether bytes that made no request are of a head; of a new connection aiohttp may not wait yet."""
        return self._request_count == 0 or (self._waiter is not None and not self._waiter.done())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; aiohttp's own errors in our words."""
        if isinstance(resp, web.HTTPException):
            resp = self._strays.translated(request, resp)
        if self._head_begun(request):
            self._start_head_timer()
        seen = self._request_count
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            # aiohttp has parsed by itself what came behind an upgrade that was declined.
            if self._request_count != seen and self._messages:
                self._watch_body(*self._messages[-1])

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer when no handler could give one."""
        super().handle_error(request, status, exc, message)  # logs, and raises if an answer was begun
        return self._strays.broken(request, status, message)

    def _process_keepalive(self) -> None:
        """Close the connection if it has been idle for long. One in a head is not: that has its own limit."""
        if self._head_timer is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None  # aiohttp arms it again with the answer

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._patience.head_s, self._give_up_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_head(self) -> None:
        """Have the request that is not whole answered as one that cannot be read."""
        self._head_timer = None
        if self._waiter is None or self._waiter.done():
            return
        message = f"the head of the request did not come within {self._patience.head_s:g} s"
        error = HttpProcessingError(code=HTTPStatus.REQUEST_TIMEOUT, message=message)
        self._messages.append((_ErrInfo(HTTPStatus.REQUEST_TIMEOUT, error, message), EMPTY_PAYLOAD))
        self._waiter.set_result(None)

    def _stop_answer_timer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _watch_answer(self, unsent_bytes: int) -> None:
        """Drop a client that has taken nothing since there were so many; it would keep them here for ever."""
        if self.transport is None:
            return
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes < unsent_bytes:
            self._answer_timer = self._loop.call_later(self._patience.idle_s, self._watch_answer, left_bytes)
        else:
            self.transport.abort()

    def _watch_body(self, message: RawRequestMessage | _ErrInfo, body: StreamReader) -> None:
        """Remember the newest request's body. What is no HTTP behind it is its end: the rest never comes.

        aiohttp tells nobody, and who reads the body would wait until its time is over. It is kept here, as
        for a turn of the loop a request is in aiohttp's queue no more and its handler not yet begun.
        """
        if not isinstance(message, _ErrInfo):
            self._body = None if body.is_eof() else body
            return
        broken, self._body = self._body or self._unwatched_body(), None
        if broken is None or broken.is_eof():
            return
        error = web.RequestPayloadError(message.message)
        error.__cause__ = message.exc
        broken.set_exception(error)
        # A reader that the end of a chunk has just woken finds no bytes and waits again without a look at the
        # error; its turn comes before this one.
        self._loop.call_soon(broken.set_exception, error)

    def _unwatched_body(self) -> StreamReader | None:
        """Of the last request, while an answer before it waits to be taken: see `finish_response`."""
        bodies = [body for message, body in self._messages if not isinstance(message, _ErrInfo)]
        return bodies[-1] if bodies else None
