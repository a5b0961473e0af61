"""A port that answers from the first moment: alive but not ready while a model loads, then the application.

The socket is bound before anything slow: a port in use is found at once, and probes see a live process.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from aiohttp import hdrs, web

from gateway.errors import ApiError, ErrorKind
from gateway.exchange import REQUEST_ID, SERVER, Handler, Page, give, refuse, request_id
from gateway.listener import prepare
from gateway.media import Media
from gateway.metrics import GatewayMetrics
from gateway.openapi import WORK
from gateway.routes.dashboard import pages
from gateway.routes.health import HEALTH_PATH
from gateway.schemas import Status, encode
from gateway.strays import STRAYS, Strays

# Connections that wait to be accepted; the kernel may allow fewer. Beyond that it drops them, and clients who
# think themselves connected are reset: with 1024, some 2000 were when others had a loaded server's cores.
BACKLOG = 4096
# libuv accepts one connection a turn of the loop for each listening handle, and with 1000 busy clients a turn
# takes 0.1 s: of 1000 that came at once 620 had no answer after 6 s with one handle, none after 3 s with 16.
_ACCEPTS_A_TURN = 16
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


def listen_at(path: str) -> socket.socket:
    """A listening unix socket at `path`. One that a dead server left behind is replaced.

    Raises:
        OSError: a live server listens there, or the path cannot be written.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(ConnectionRefusedError, FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
        if Path(path).is_socket():
            Path(path).unlink()
        elif Path(path).exists():  # bind would say "in use" of a folder, too
            raise OSError(errno.EEXIST, "there is something else than a socket", path)
        listening.bind(path)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """TLS 1.2 and later with a PEM certificate chain. key: None: it is in the certificate's file.

    Raises:
        OSError, ssl.SSLError: a file cannot be read, or the two do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


class Port:
    """One listening socket and what answers on it: first "loading", later the application.

    Connections opened while loading are closed after their answer, so that later ones reach the application.
    why_not_ready: what is told until then.
    """

    def __init__(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """listening: from `listen_on` or `listen_at`; closed with the port. tls: speak HTTPS."""
        self._socket = listening
        self._tls = tls
        self._path = listening.getsockname() if listening.family == socket.AF_UNIX else None
        self._url = _url(listening, "http" if tls is None else "https")
        self._listeners: list[asyncio.Server] = []
        self._loading: web.AppRunner | None = None
        self._running: web.AppRunner | None = None
        self.why_not_ready: Callable[[], str] = lambda: "the model is still loading"

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server; of a unix socket, what goes into its requests."""
        return self._url

    @property
    def path(self) -> str | None:
        """The unix socket's path, if it is one."""
        return self._path

    async def open(self, *, dashboard: bool = False) -> None:
        """Answer: /health is 200, the rest 503 with Retry-After. dashboard: the page at / is there, too."""
        self._loading = await prepare(_loading_app(pages() if dashboard else {}, self))
        loop = asyncio.get_running_loop()
        listen = loop.create_server if self._path is None else loop.create_unix_server
        for listening in (self._socket, *(self._socket.dup() for _ in range(_ACCEPTS_A_TURN - 1))):
            server = await listen(self._connection, sock=listening, backlog=BACKLOG, ssl=self._tls)
            self._listeners.append(server)

    async def serve(self, app: web.Application) -> None:
        """From the next connection on, `app` answers."""
        self._running = await prepare(app)

    def stop_accepting(self) -> None:
        """Refuse new connections; the open ones go on."""
        if self._listeners:
            for listener in self._listeners:
                listener.close()
            self._listeners.clear()
            if self._path is not None:
                Path(self._path).unlink(missing_ok=True)

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


def _url(listening: socket.socket, scheme: str) -> str:
    if listening.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _loading_app(shown: Mapping[str, Page], port: Port) -> web.Application:
    app = web.Application()
    strays = app[STRAYS] = Strays(GatewayMetrics())
    strays.shapes |= {path: work.shape for work in WORK for path in work.paths}
    app.router.add_get(HEALTH_PATH, _alive)
    for path, page in shown.items():
        app.router.add_get(path, _showing(page))
    app.router.add_route(hdrs.METH_ANY, "/{path:.*}", _refusing(port), expect_handler=strays.expectation)
    return app


def _showing(page: Page) -> Handler:
    async def show(request: web.Request) -> web.StreamResponse:
        response = give(request, page(request.headers))
        response.force_close()
        return response

    return show


async def _alive(request: web.Request) -> web.Response:
    response = web.Response(
        body=encode(Status(status="ok"), Media.JSON),
        content_type=Media.JSON.value,
        headers={REQUEST_ID: request_id(request.headers.get(REQUEST_ID)), hdrs.SERVER: SERVER},
    )
    response.force_close()
    return response


def _refusing(port: Port) -> Handler:
    async def not_ready(request: web.Request) -> web.StreamResponse:
        headers = ((str(hdrs.RETRY_AFTER), _RETRY_AFTER_S),)
        error = ApiError(ErrorKind.UNAVAILABLE, port.why_not_ready(), headers=headers, closes=True)
        error.shape = request.app[STRAYS].shapes.get(request.path)
        return refuse(request, error)

    return not_ready
