"""A port that answers from the first moment: alive but not ready while a model loads, then the application.

The socket is bound before anything slow: a port in use is found at once, and probes see a live process.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import hdrs, web

from gateway.errors import ApiError, ErrorKind
from gateway.exchange import Answer, refuse
from gateway.listener import prepare
from gateway.media import Media
from gateway.routes.health import HEALTH_PATH
from gateway.schemas import Status, encode

BACKLOG = 1024
_RETRY_AFTER_S = "1"


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its backlog. port 0 takes a free one; "::" takes IPv4 as well.

    Raises:
        OSError: the address is in use, not ours, or no address.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


class Port:
    """One listening socket and what answers on it: first "loading", later the application.

    Connections opened while loading are closed after their answer, so that later ones reach the application.
    """

    def __init__(self, listening: socket.socket) -> None:
        """listening: from `listen_on`; closed with the port."""
        self._socket = listening
        self._url = _url(listening)
        self._listener: asyncio.Server | None = None
        self._loading: web.AppRunner | None = None
        self._running: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        return self._url

    async def open(self) -> None:
        """Answer: /health is 200, everything else 503 with Retry-After."""
        self._loading = await prepare(_loading_app())
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connection, sock=self._socket, backlog=BACKLOG)

    async def serve(self, app: web.Application) -> None:
        """From the next connection on, `app` answers."""
        self._running = await prepare(app)

    def stop_accepting(self) -> None:
        """Refuse new connections; the open ones go on."""
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """End every connection, after its answer if one is being made, and the applications."""
        self.stop_accepting()
        for runner in (self._loading, self._running):
            if runner is not None:
                await runner.cleanup()

    def _connection(self) -> asyncio.BaseProtocol:
        """What handles a new connection: aiohttp's protocol of the application that is up."""
        runner = self._running or self._loading
        if runner is None or runner.server is None:
            raise RuntimeError("a connection before open()")
        return runner.server()


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loading_app() -> web.Application:
    app = web.Application()
    app.router.add_get(HEALTH_PATH, _alive)
    app.router.add_route(hdrs.METH_ANY, "/{path:.*}", _not_ready)
    return app


async def _alive(_: web.Request) -> web.Response:
    answer = Answer(encode(Status(status="ok"), Media.JSON), Media.JSON.value)
    response = web.Response(body=answer.body, content_type=answer.content_type)
    response.force_close()
    return response


async def _not_ready(request: web.Request) -> web.Response:
    headers = ((str(hdrs.RETRY_AFTER), _RETRY_AFTER_S),)
    return refuse(
        request, ApiError(ErrorKind.UNAVAILABLE, "the model is still loading", headers=headers, closes=True)
    )
