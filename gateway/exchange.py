"""One HTTP exchange: key, body in, answer or error out. The frame around every route; knows no dialect."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import hdrs, web
from multidict import CIMultiDict, istr

from gateway.auth import KeyRing
from gateway.errors import ApiError, ErrorKind, error_body, from_exception, shown
from gateway.media import Media, answer_media, request_media
from gateway.schemas import encode

REQUEST_ID, TOTAL_TIME = istr("x-request-id"), istr("x-total-time")
_ID_WANTED = re.compile(r"[\x21-\x7e]{1,128}")
# The first part differs between processes, the second within one; a tenth of uuid4's cost.
_ID_PREFIX = os.urandom(8).hex()
_ID_NUMBERS = itertools.count(1)

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Call:
    """What a work route gets: the body, its codec, and the codec that the answer shall have."""

    body: bytes
    media: Media
    answer_media: Media


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route gives back when all went well."""

    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


class Door:
    """What stands before the routes: the keys, and the bytes that a body may have."""

    def __init__(self, keys: KeyRing, max_body_bytes: int) -> None:
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    def work(self, route: Callable[[Call], Awaitable[Answer]]) -> Handler:
        """`route` as an aiohttp handler: checks key, codec and size, and turns exceptions into answers."""

        async def handle(request: web.Request) -> web.StreamResponse:
            started_s = time.perf_counter()
            headers = request.headers
            asked_in = request_media(headers.get(hdrs.CONTENT_TYPE))
            codec = answer_media(headers.get(hdrs.ACCEPT), asked_in or Media.JSON)
            try:
                self._keys.check(headers.get(hdrs.AUTHORIZATION))
                if asked_in is None:
                    raise _unsupported(headers[hdrs.CONTENT_TYPE])
                answer = await route(Call(await self._read(request), asked_in, codec))
            except Exception as error:
                return refuse(request, from_exception(error), codec, started_s)
            return _response(request, 200, answer, started_s)

        return handle

    def keyed(self, page: Callable[[], Answer]) -> Handler:
        """A GET page that wants a key."""
        return _page(page, self._keys)

    def open(self, page: Callable[[], Answer]) -> Handler:
        """A GET page for everyone."""
        return _page(page, KeyRing(()))

    async def _read(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > self._max_body_bytes:
            raise self._too_large(f"has {request.content_length} bytes")
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:  # chunked, or inflated from a compressed body
            raise self._too_large("is too large") from None
        except web.RequestPayloadError as error:  # broken compression or chunks
            message = f"the body cannot be read: {error}"
            raise ApiError(ErrorKind.INVALID_BODY, message, closes=True) from None

    def _too_large(self, what: str) -> ApiError:
        limit = self._max_body_bytes
        return ApiError(ErrorKind.BODY_TOO_LARGE, f"the body {what}; this server takes up to {limit} bytes")


def _page(page: Callable[[], Answer], keys: KeyRing) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            keys.check(request.headers.get(hdrs.AUTHORIZATION))
            return _response(request, 200, page(), None)
        except Exception as error:
            return refuse(request, from_exception(error))

    return handle


def refuse(
    request: web.Request, error: ApiError, codec: Media = Media.JSON, started_s: float | None = None
) -> web.Response:
    """The answer for `error`."""
    answer = Answer(encode(error_body(error), codec), codec.value, error.headers)
    response = _response(request, error.kind.status, answer, started_s)
    if error.closes:
        response.force_close()
    return response


def _response(request: web.Request, status: int, answer: Answer, started_s: float | None) -> web.Response:
    headers: CIMultiDict[str] = CIMultiDict(answer.headers)
    headers[hdrs.CONTENT_TYPE] = answer.content_type
    headers[REQUEST_ID] = _request_id(request)
    if started_s is not None:
        headers[TOTAL_TIME] = f"{(time.perf_counter() - started_s) * 1e3:.3f}"
    return web.Response(body=answer.body, status=status, headers=headers)


def _request_id(request: web.Request) -> str:
    """The client's own id if it is printable ASCII of up to 128 characters, else a new one."""
    given = request.headers.get(REQUEST_ID)
    if given is not None and _ID_WANTED.fullmatch(given):
        return given
    return f"{_ID_PREFIX}-{next(_ID_NUMBERS):x}"


def _unsupported(content_type: str) -> ApiError:
    return ApiError(
        ErrorKind.UNSUPPORTED_MEDIA_TYPE,
        f"Content-Type is {shown(content_type)}; this route takes application/json and application/msgpack",
    )
