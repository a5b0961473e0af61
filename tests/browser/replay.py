"""The page over a recording of tests/browser/record.py, as if that server were here.

    python -m tests.browser.replay FILE [--port 8001]

All events are sent at once, and the stream then stays open: rates and times are worked out from the server's
own clock, so the page shows the last moment of the recording with all that led to it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from gateway.exchange import Page
from gateway.routes.dashboard import EVENTS_PATH, pages
from tests.browser.record import Recording


def load(file: Path) -> Recording:
    """A recording.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(file.read_bytes(), type=Recording)


def create_app(recording: Recording) -> web.Application:
    """Page, files and events; nothing else of a server."""
    app = web.Application()
    for path, page in pages().items():
        app.router.add_get(path, _file(page))

    async def events(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _, name, value in recording.events:
            await answer.write(b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value)))
        await asyncio.Event().wait()
        return answer

    app.router.add_get(EVENTS_PATH, events)
    return app


@asynccontextmanager
async def replaying(recording: Recording, port: int = 0) -> AsyncIterator[str]:
    """Its address on loopback. port: 0: any."""
    runner = web.AppRunner(create_app(recording), shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _file(page: Page) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        answer = page(request.headers)
        headers = {"Content-Type": answer.content_type, **dict(answer.headers)}
        return web.Response(body=answer.body, status=answer.status, headers=headers)

    return respond


async def _show(file: Path, port: int) -> None:
    async with replaying(load(file), port) as url:
        print(url)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show a recorded page.")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--port", type=int, default=8001)
    asyncio.run(_show(**vars(parser.parse_args())))
