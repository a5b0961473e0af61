"""How the application is put on a socket: one place for aiohttp's runner settings, in server and tests."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestHandler

from gateway.bodies import unknown_encoding
from gateway.errors import INTERNAL_MESSAGE, ApiError, ErrorKind, shown
from gateway.exchange import refuse

ACCESS_LOG = logging.getLogger("gateway.access")
HTTP_LOG = logging.getLogger("gateway.http")

# Longer than the 60 s after which common load balancers drop an idle connection, so that they close first.
_KEEPALIVE_S = 75.0
# For the whole head of a connection's first request.
_HEAD_S = 75.0


def _is_ours(record: logging.LogRecord) -> bool:
    """False for what aiohttp logs with a traceback although only the client is to blame: it got a 400."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


HTTP_LOG.addFilter(_is_ours)


class AccessLogger(AbstractAccessLogger):
    """One line a request, at debug level only; costs nothing otherwise."""

    @property
    def enabled(self) -> bool:
        """Whether lines are written at all; aiohttp asks once a connection."""
        return self.logger.isEnabledFor(logging.DEBUG)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Write the line of one request; `time` in seconds."""
        self.logger.debug(
            "%s %s %d %.3f ms id=%s from=%s",
            request.method,
            request.path,
            response.status,
            time * 1e3,
            response.headers.get("x-request-id", "-"),
            request.remote,
        )


class _Connection(RequestHandler):
    """Tells also those in our words whose bytes are no HTTP; aiohttp's own would be plain text.

    Drops clients whose first request does not come, which aiohttp would wait for without end.
    """

    __slots__ = ("_head_timer",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(_HEAD_S, self._drop_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone; the timer would keep all of it in memory."""
        self._head_timer.cancel()
        super().connection_lost(exc)

    def _drop_if_silent(self) -> None:
        if self._request_count == 0 and self.transport is not None:
            self.transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and raises if an answer was begun
        if status >= ErrorKind.INTERNAL.status:
            return refuse(request, ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE, closes=True))
        if isinstance(exc, ContentEncodingError):  # of aiohttp's own codings one that it has no module for
            return refuse(request, unknown_encoding("one without a module here", closes=True))
        words = shown(" ".join(str(message).split()))
        return refuse(
            request, ApiError(ErrorKind.INVALID_HTTP, f"this is no HTTP request: {words}", closes=True)
        )


class _Server(web.Server):
    """Makes such connections."""

    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """Makes such a server. aiohttp has no public place to choose the class, so that of its own is changed."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        return server


async def prepare(app: web.Application) -> web.AppRunner:
    """A started `app` that answers on no socket yet; end it with `await runner.cleanup()`.

    A handler is cancelled when its client leaves, which frees its place in the queue.
    """
    runner = _Runner(
        app,
        handler_cancellation=True,
        logger=HTTP_LOG,
        access_log=ACCESS_LOG,
        access_log_class=AccessLogger,
        keepalive_timeout=_KEEPALIVE_S,
    )
    await runner.setup()
    return runner


async def listen(app: web.Application, host: str, port: int, *, backlog: int = 1024) -> web.AppRunner:
    """Serve `app` at host:port until `runner.cleanup()`; port 0 takes a free one, see `runner.addresses`.

    Raises:
        OSError: the address is in use or not ours.
    """
    runner = await prepare(app)
    try:
        await web.TCPSite(runner, host, port, backlog=backlog).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner
