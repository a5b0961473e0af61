"""One HTTP exchange: key, body in, answer or error out. The frame around every route; knows no dialect."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

import msgspec
from aiohttp import hdrs, web
from multidict import istr

from gateway.auth import KeyRing
from gateway.bodies import BodyReader
from gateway.deadline import HEADER, Deadline, read_deadline
from gateway.drain import Drain
from gateway.error_bodies import error_body
from gateway.errors import ApiError, ErrorKind, ErrorShape, from_exception, retry_headers, shown
from gateway.media import Media, answer_media, request_media
from gateway.metrics import ELSEWHERE, GatewayMetrics, RouteMetrics
from gateway.options import GatewayOptions
from gateway.schemas import encode

REQUEST_ID, TOTAL_TIME, TIMEOUT = istr("x-request-id"), istr("x-total-time"), istr(HEADER)
# In place of aiohttp's own, which names the versions of Python and of itself.
SERVER = "bouquet"
_ID_WANTED = re.compile(r"[\x21-\x7e]{1,128}")
# The first part differs between processes, the second within one; a tenth of uuid4's cost.
_ID_PREFIX = f"{os.urandom(8).hex()}-"
_ID_NUMBERS = itertools.count(1)

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Headers: TypeAlias = Mapping[str, str]


class Call(msgspec.Struct, frozen=True):
    """What a work route gets: the body, its codec, the codec that the answer shall have, and its deadline."""

    body: bytes
    media: Media
    answer_media: Media
    deadline: Deadline | None = None


class Answer(msgspec.Struct, frozen=True):
    """What a route gives back when all went well. status: 304 where the client has the body already."""

    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()
    status: int = 200


class Reply(msgspec.Struct, frozen=True):
    """A whole answer, for whoever writes it. closes: the connection ends after it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    closes: bool = False


# A work route behind its door: of a request's headers and a way to get its body it makes the answer.
Work: TypeAlias = Callable[[Headers, Callable[[], Awaitable[bytes]]], Awaitable[Reply]]


# What a page is made of where it depends on the request's headers.
Page: TypeAlias = Callable[[Headers], Answer]


class Events(Protocol):
    """A stream of server-sent events: bytes as they are to be sent, until it ends.

    on_drop: set by whoever sends them; called to end the connection of a client that takes too few.
    """

    on_drop: Callable[[], None]

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The bytes."""
        ...

    def leave(self) -> None:
        """The client is gone, or has all."""
        ...


Stream: TypeAlias = Callable[[], Events]
# Proxies shall neither keep nor gather events.
_EVENTS = Answer(b"", "text/event-stream", (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")))


class PlainRequest(msgspec.Struct, frozen=True):
    """A plain request as it came."""

    head: bytes
    body: bytes


class PlainRoutes(msgspec.Struct):
    """The work routes by path, for `gateway.express`. max_body_bytes: of a request's body.

    newest: the last small request in msgpack that came, until it is answered, if `keeps_newest`.
    """

    works: dict[bytes, Work]
    max_body_bytes: int
    keeps_newest: bool = False
    newest: PlainRequest | None = None


PLAIN_ROUTES = web.AppKey("plain_routes", PlainRoutes)


class Door:
    """What stands before the routes: the keys, how much may be under way, and what a body may be.

    drain: turns new work away in a shutdown. waiting_s: seconds that what waits now will take, at the
    measured rate; asked when a request is turned away.
    """

    def __init__(
        self,
        options: GatewayOptions,
        metrics: GatewayMetrics,
        drain: Drain,
        waiting_s: Callable[[], float],
    ) -> None:
        self._keys = KeyRing(options.api_keys)
        self._bodies = BodyReader(options.max_body_bytes, options.body_timeout_s)
        self._timeout_s = options.request_timeout_s
        self._max_outstanding = options.max_outstanding_requests
        self._metrics = metrics
        self._drain = drain
        self._waiting_s = waiting_s

    def work(
        self, path: str, route: Callable[[Call], Awaitable[Answer]], shape: ErrorShape = ErrorShape.OPENAI
    ) -> Work:
        """`route` with all checks before it: key, codec and size; turns exceptions into answers.

        path: what its counters are called. shape: how errors are told, unless the error knows better.
        """
        metrics, observed = self._metrics, self._metrics.route(path)

        async def work(headers: Headers, body: Callable[[], Awaitable[bytes]]) -> Reply:
            started_s = time.perf_counter()
            asked_in = request_media(headers.get(hdrs.CONTENT_TYPE))
            codec = answer_media(headers.get(hdrs.ACCEPT), asked_in or Media.JSON)
            metrics.outstanding += 1
            try:
                self._drain.check()
                self._keys.check(headers.get(hdrs.AUTHORIZATION))
                if asked_in is None:
                    raise _unsupported(headers[hdrs.CONTENT_TYPE])
                if metrics.outstanding > self._max_outstanding:
                    raise self._crowded()
                deadline = read_deadline(headers.get(TIMEOUT), started_s, self._timeout_s)
                answer = await route(Call(await body(), asked_in, codec, deadline))
            except asyncio.CancelledError:
                observed.cancelled += 1
                raise
            except Exception as error:
                return self._refusal(headers, from_exception(error), observed, started_s, codec, shape)
            finally:
                metrics.outstanding -= 1
            return _reply(headers, 200, answer, observed, started_s)

        return work

    def handler(self, work: Work) -> Handler:
        """`work` for requests that aiohttp has parsed."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return _response(await work(request.headers, lambda: self._bodies.read(request)))

        return handle

    def keyed(self, path: str, page: Callable[[], Answer]) -> Handler:
        """A GET page that wants a key."""
        return self._page(path, lambda _: page(), self._keys)

    def open(self, path: str, page: Callable[[], Answer]) -> Handler:
        """A GET page for everyone."""
        return self._page(path, lambda _: page(), KeyRing(()))

    def file(self, path: str, page: Page) -> Handler:
        """A GET page for everyone that depends on the request's headers."""
        return self._page(path, page, KeyRing(()))

    def stream(self, path: str, begin: Stream) -> Handler:
        """Server-sent events, with a key. A stream is no work under way: a shutdown does not wait for it."""
        observed = self._metrics.route(path)

        async def handle(request: web.Request) -> web.StreamResponse:
            started_s = time.perf_counter()
            headers = request.headers
            try:
                self._drain.check()
                self._keys.check(headers.get(hdrs.AUTHORIZATION))
                events = begin()
            except Exception as error:
                return _response(self._refusal(headers, from_exception(error), observed, started_s))
            return await _send(request, events, _reply(headers, 200, _EVENTS, observed, started_s))

        return handle

    def refusing(self, error: Callable[[web.Request], ApiError]) -> Handler:
        """A handler that always refuses; counted as elsewhere."""
        observed = self._metrics.route(ELSEWHERE)

        async def handle(request: web.Request) -> web.StreamResponse:
            return _response(self._refusal(request.headers, error(request), observed, time.perf_counter()))

        return handle

    def _page(self, path: str, page: Page, keys: KeyRing) -> Handler:
        observed = self._metrics.route(path)

        async def handle(request: web.Request) -> web.StreamResponse:
            started_s = time.perf_counter()
            headers = request.headers
            try:
                keys.check(headers.get(hdrs.AUTHORIZATION))
                answer = page(headers)
                return _response(_reply(headers, answer.status, answer, observed, started_s))
            except Exception as error:
                return _response(self._refusal(headers, from_exception(error), observed, started_s))

        return handle

    def _refusal(
        self,
        headers: Headers,
        error: ApiError,
        observed: RouteMetrics,
        started_s: float,
        codec: Media = Media.JSON,
        shape: ErrorShape = ErrorShape.OPENAI,
    ) -> Reply:
        """The answer; shape: of an error that has none.

        No caller keeps the error by a name: its traceback keeps the caller's frame, and with it a body of
        megabytes until the collector runs.
        """
        error.shape = error.shape or shape
        self._metrics.count_error(error.kind)
        return _refusal(headers, error, codec, observed, started_s)

    def _crowded(self) -> ApiError:
        waiting_s = self._waiting_s()
        return ApiError(
            ErrorKind.OVERLOADED,
            f"{self._max_outstanding} requests are being worked on, as many as this server takes at once;"
            f" retry in {waiting_s:.3g} s",
            headers=retry_headers(waiting_s),
        )


def give(request: web.BaseRequest, answer: Answer) -> web.Response:
    """A page where no door is."""
    return _response(_reply(request.headers, answer.status, answer, None, None))


def refuse(request: web.BaseRequest, error: ApiError) -> web.Response:
    """The answer for `error` where no door is."""
    return _response(_refusal(request.headers, error, Media.JSON, None, None))


async def _send(request: web.Request, events: Events, head: Reply) -> web.StreamResponse:
    """Send what comes until it ends or the client leaves, which cancels this."""
    response = web.StreamResponse(status=head.status, headers=head.headers)
    transport = request.transport
    try:
        await response.prepare(request)
        if transport is not None:
            events.on_drop = transport.abort
        async for chunk in events:
            await response.write(chunk)
    except ConnectionError:  # the client left
        pass
    finally:
        events.leave()
    return response


def _refusal(
    headers: Headers,
    error: ApiError,
    codec: Media,
    observed: RouteMetrics | None,
    started_s: float | None,
) -> Reply:
    shape = error.shape or ErrorShape.OPENAI
    answer = Answer(encode(error_body(error, shape), codec), codec.value, error.headers)
    return _reply(headers, shape.status(error.kind), answer, observed, started_s, closes=error.closes)


def _response(reply: Reply) -> web.Response:
    response = web.Response(body=reply.body, status=reply.status, headers=reply.headers)
    if reply.closes:
        response.force_close()
    return response


def _reply(
    asked: Headers,
    status: int,
    answer: Answer,
    observed: RouteMetrics | None,
    started_s: float | None,
    *,
    closes: bool = False,
) -> Reply:
    """An answer with its headers; counts it, too: this is when it is made. asked: the request's headers."""
    headers = [
        *answer.headers,
        (hdrs.CONTENT_TYPE, answer.content_type),
        (REQUEST_ID, request_id(asked.get(REQUEST_ID))),
        (hdrs.SERVER, SERVER),
    ]
    if started_s is not None:
        elapsed_s = time.perf_counter() - started_s
        headers.append((TOTAL_TIME, f"{elapsed_s * 1e3:.3f}"))
        if observed is not None:
            observed.answered(status, elapsed_s)
    return Reply(status, headers, answer.body, closes)


def request_id(given: str | None) -> str:
    """The client's own id if it is printable ASCII of up to 128 characters, else a new one."""
    if given is not None and _ID_WANTED.fullmatch(given):
        return given
    return _ID_PREFIX + format(next(_ID_NUMBERS), "x")


def _unsupported(content_type: str) -> ApiError:
    return ApiError(
        ErrorKind.UNSUPPORTED_MEDIA_TYPE,
        f"Content-Type is {shown(content_type)}; this route takes application/json and application/msgpack",
    )
