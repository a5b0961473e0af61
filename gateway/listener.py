"""How the application is put on a socket: one place for aiohttp's runner settings, in server and tests."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http import HttpProcessingError

from gateway.connection import CLIENT_PATIENCE, ClientPatience
from gateway.drain import DRAIN, Drain
from gateway.exchange import PLAIN_ROUTES, PlainRoutes
from gateway.express import ExpressConnection
from gateway.metrics import GatewayMetrics
from gateway.strays import STRAYS, Strays

ACCESS_LOG = logging.getLogger("gateway.access")
HTTP_LOG = logging.getLogger("gateway.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """False for what aiohttp logs with a traceback although its client is to blame: it got a 400, or left."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


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


class _Server(web.Server):
    """Makes our connections."""

    patience: ClientPatience
    strays: Strays
    plain_routes: PlainRoutes | None
    drain: Drain

    def __call__(self) -> ExpressConnection:
        parts = (self.patience, self.strays, self.plain_routes, self.drain)
        return ExpressConnection(self, *parts, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """Makes such a server. aiohttp has no public place to choose the class, so that of its own is changed."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        assert isinstance(server, _Server)
        server.patience = self.app.get(CLIENT_PATIENCE, ClientPatience())
        server.strays = self.app.get(STRAYS) or Strays(GatewayMetrics())
        server.plain_routes = self.app.get(PLAIN_ROUTES)
        server.drain = self.app.get(DRAIN) or Drain(GatewayMetrics())
        return server


async def prepare(app: web.Application) -> web.AppRunner:
    """A started `app` that answers on no socket yet; end it with `await runner.cleanup()`.

    A handler is cancelled when its client leaves, which frees its place in the queue.
    """
    runner = _Runner(
        app,
        handler_cancellation=True,
        auto_decompress=False,  # it takes a body that was cut short for a whole one
        logger=HTTP_LOG,
        access_log=ACCESS_LOG,
        access_log_class=AccessLogger,
        keepalive_timeout=app.get(CLIENT_PATIENCE, ClientPatience()).idle_s,
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
