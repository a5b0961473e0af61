"""A request's body, whole: within its size, its time and the compressions that we know."""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader, compression_utils, hdrs, web
from aiohttp.http import HttpProcessingError

from gateway.errors import ApiError, ErrorKind, shown

# What aiohttp's parser has inflated before we see the body. It hands on others as they came, and fails on
# those of its own that it lacks a module for.
ENCODINGS = (
    ("gzip", "deflate") + ("zstd",) * compression_utils.HAS_ZSTD + ("br",) * compression_utils.HAS_BROTLI
)


class BodyReader:
    """max_bytes: of the inflated body. timeout_s: for all of it, once the head has come."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def read(self, request: web.Request) -> bytes:
        """The inflated body.

        Raises:
            ApiError: BODY_TOO_LARGE, BODY_TIMEOUT, INVALID_BODY or UNSUPPORTED_MEDIA_TYPE.
        """
        encoding = request.headers.get(hdrs.CONTENT_ENCODING)
        if encoding is not None:
            _check_encoding(encoding)
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large(f"has {request.content_length} bytes")
        try:
            if request.content.is_eof():  # it came with the head: no timer, no copy
                return self._whole(request.content)
            async with asyncio.timeout(self._timeout_s):
                return await (request.read() if encoding is None else self._inflated(request.content))
        except TimeoutError:
            message = f"the body did not come within {self._timeout_s:g} s"
            raise ApiError(ErrorKind.BODY_TIMEOUT, message, closes=True) from None
        except web.HTTPRequestEntityTooLarge:  # chunked
            raise self._too_large("is too large") from None
        except web.RequestPayloadError as error:  # broken compression or chunks
            cause = error.__cause__  # aiohttp's own; its text is a status and an indented message
            words = cause.message if isinstance(cause, HttpProcessingError) else error
            message = f"the body cannot be read: {' '.join(str(words).split())}"
            raise ApiError(ErrorKind.INVALID_BODY, message, closes=True) from None

    async def _inflated(self, content: StreamReader) -> bytes:
        """The body. Each part is inflated when the one before is taken; others have their turn between."""
        parts: list[bytes] = []
        size = 0
        while not content.at_eof():
            parts.append(await content.readany())
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large("is too large", closes=True)
            await asyncio.sleep(0)
        return b"".join(parts)

    def _whole(self, content: StreamReader) -> bytes:
        body = content.read_nowait()
        if len(body) > self._max_bytes:
            raise self._too_large("is too large")
        return body

    def _too_large(self, what: str, *, closes: bool = False) -> ApiError:
        message = f"the body {what}; this server takes up to {self._max_bytes} bytes"
        return ApiError(ErrorKind.BODY_TOO_LARGE, message, closes=closes)


def unknown_encoding(encoding: str, *, closes: bool = False) -> ApiError:
    """How a body in this `Content-Encoding` is refused. closes: what follows on the connection is lost."""
    known = ", ".join(ENCODINGS)
    message = f"Content-Encoding is {encoding}; this server knows {known}"
    headers = ((str(hdrs.ACCEPT_ENCODING), known),)  # RFC 9110, 15.5.16
    return ApiError(ErrorKind.UNSUPPORTED_MEDIA_TYPE, message, headers=headers, closes=closes)


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in (*ENCODINGS, "identity"):
        raise unknown_encoding(shown(encoding))
