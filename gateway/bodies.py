"""A request's body, whole: within its size, its time and the compressions that we know."""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader, hdrs, web
from aiohttp.http import HttpProcessingError

from gateway.errors import ApiError, ErrorKind, shown
from gateway.inflation import CODINGS, inflated


class BodyReader:
    """max_bytes: of the inflated body. timeout_s: for all of it, once the head has come."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def read(self, request: web.Request) -> bytes:
        """The inflated body.

        Raises:
            ApiError: BODY_TOO_LARGE, BODY_TIMEOUT, INVALID_BODY, UNSUPPORTED_MEDIA_TYPE or
                UNKNOWN_TRANSFER_CODING.
        """
        _check_transfer(request.headers.get(hdrs.TRANSFER_ENCODING, ""))
        encoding = request.headers.get(hdrs.CONTENT_ENCODING)
        coding = None if encoding is None else _coding(encoding)
        body = await self._received(request)
        return body if coding is None else await self._inflated(body, coding)

    async def _received(self, request: web.Request) -> bytes:
        """The body as it came."""
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large(f"has {request.content_length} bytes")
        try:
            if request.content.is_eof():  # it came with the head: no timer, no copy
                return self._whole(request.content)
            async with asyncio.timeout(self._timeout_s):
                return await request.read()
        except TimeoutError:
            message = f"the body did not come within {self._timeout_s:g} s"
            raise ApiError(ErrorKind.BODY_TIMEOUT, message, closes=True) from None
        except web.HTTPRequestEntityTooLarge:  # chunked
            raise self._too_large("is too large") from None
        except (web.RequestPayloadError, HttpProcessingError) as error:  # broken chunks
            # What the parser raised: a cause, or by itself where the parser is the one in Python. Its text is
            # a status and an indented message.
            cause = error.__cause__ or error
            words = cause.message if isinstance(cause, HttpProcessingError) else error
            message = f"the body cannot be read: {' '.join(str(words).split())}"
            raise ApiError(ErrorKind.INVALID_BODY, message, closes=True) from None

    async def _inflated(self, body: bytes, coding: str) -> bytes:
        """What a compressed body holds. Others have their turn between the parts."""
        parts: list[bytes] = []
        size = 0
        try:
            for part in inflated(body, coding):
                parts.append(part)
                size += len(part)
                if size > self._max_bytes:
                    raise self._too_large("is too large")
                await asyncio.sleep(0)
        except ValueError as error:
            message = f"the body cannot be read as {coding}: {error}"
            raise ApiError(ErrorKind.INVALID_BODY, message) from None
        return b"".join(parts)

    def _whole(self, content: StreamReader) -> bytes:
        body = content.read_nowait()
        if len(body) > self._max_bytes:
            raise self._too_large("is too large")
        return body

    def _too_large(self, what: str) -> ApiError:
        message = f"the body {what}; this server takes up to {self._max_bytes} bytes"
        return ApiError(ErrorKind.BODY_TOO_LARGE, message)


def _check_transfer(codings: str) -> None:
    """Refuse what is more than `chunked`, all that aiohttp takes off a body that has other codings as well.

    Raises:
        ApiError: UNKNOWN_TRANSFER_CODING.
    """
    if {coding.strip().lower() for coding in codings.split(",")} - {"chunked", ""}:
        message = f"Transfer-Encoding is {shown(codings)}; this server knows chunked"
        raise ApiError(ErrorKind.UNKNOWN_TRANSFER_CODING, message, closes=True)


def _coding(encoding: str) -> str | None:
    """Of a `Content-Encoding`; None: as it is.

    Raises:
        ApiError: UNSUPPORTED_MEDIA_TYPE.
    """
    coding = encoding.strip().lower()
    if coding == "x-gzip":  # the same (RFC 9110, 8.4.1.3)
        return "gzip"
    if coding == "identity":
        return None
    if coding in CODINGS:
        return coding
    known = ", ".join(CODINGS)
    message = f"Content-Encoding is {shown(encoding)}; this server knows {known}"
    headers = ((str(hdrs.ACCEPT_ENCODING), known),)  # RFC 9110, 15.5.16
    raise ApiError(ErrorKind.UNSUPPORTED_MEDIA_TYPE, message, headers=headers)
