"""A server without a socket, taken the short way or left to aiohttp, and a connection to it in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec
from aiohttp import web

from gateway import express
from gateway.app import create_app
from gateway.exchange import PLAIN_ROUTES
from gateway.express import ExpressConnection
from gateway.listener import prepare
from gateway.options import GatewayOptions
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info
from tests.http.served import byte_tokenizer

# What no two answers share: times, ids that the server made up.
_OWN = re.compile(
    rb"(?<=\r\n)((?:date|x-[a-z]+-time): [^\r]*|x-request-id: [0-9a-f]{16}-[0-9a-f]+)\r\n", re.I
)
IDS = {"input": [5, 6, 7]}


class Wire(asyncio.Transport):
    """A transport that keeps what was written. paused_reading: as the protocol asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.paused_reading = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.paused_reading = True

    def resume_reading(self) -> None:
        self.paused_reading = False


@dataclass
class Way:
    """A server without a socket, and one connection to it. count: of the requests taken the short way."""

    runner: web.AppRunner
    engine: FakeEngine
    batcher: Batcher
    wire: Wire = field(default_factory=Wire)

    def __post_init__(self) -> None:
        assert self.runner.server is not None
        self.protocol = self.runner.server()
        assert isinstance(self.protocol, ExpressConnection)
        self.protocol.connection_made(self.wire)

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.protocol.data_received(piece)

    async def answer(self, *pieces: bytes, apart: bool = False) -> bytes:
        """Everything written for these pieces, without times and made-up ids.

        Each comes in a turn of its own, or when all before it has been answered.
        """
        for piece in pieces:
            self.feed(piece)
            await (quiet(self) if apart else asyncio.sleep(0))
        await quiet(self)
        return _OWN.sub(b"", self.wire.written) + b"<closed>" * self.wire.closed

    @property
    def express(self) -> bool:
        return self.protocol._express


async def quiet(way: Way, turns: int = 40) -> None:
    """Until nothing is held and nothing has been written for so many turns."""
    still = 0
    async with asyncio.timeout(10):
        while still < turns or way.protocol._held:
            before = len(way.wire.written)
            await asyncio.sleep(0)
            still = still + 1 if len(way.wire.written) == before else 0


@asynccontextmanager
async def opened(
    *, short: bool, service_s: float | None = 0.0, hold_s: float = 60.0, **options: Any
) -> AsyncIterator[Way]:
    """short: plain requests go the short way. hold_s: seconds that it waits for the rest of a body.

    By default longer than any test lasts: a machine that stands still between two pieces hands none over.
    """
    engine = FakeEngine(info=fake_info(), service_s=service_s)
    batcher = Batcher(engine, SchedulerOptions())
    await batcher.start()
    app = create_app(GatewayOptions(**options), batcher, engine.info, byte_tokenizer())
    if not short:
        app._state.pop(PLAIN_ROUTES)
    runner = await prepare(app)
    way = Way(runner, engine, batcher)
    try:
        with patch.object(express, "_HOLD_S", hold_s):
            yield way
    finally:
        if not way.wire.closed:
            way.protocol.connection_lost(None)
        await batcher.close(0.0)
        await runner.cleanup()


def request(body: Any, *lines: str, path: str = "/v1/embeddings", media: str = "json") -> bytes:
    data = body if isinstance(body, bytes) else getattr(msgspec, media).encode(body)
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Type: application/{media}", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data


async def both(*pieces: bytes, apart: bool = False, **options: Any) -> tuple[bytes, bytes, bool]:
    """The answers of the short way and of aiohttp's; whether the first stayed short."""
    async with opened(short=True, **options) as short, opened(short=False, **options) as long:
        answers = [await way.answer(*pieces, apart=apart) for way in (short, long)]
        return answers[0], answers[1], short.express


PLAIN_IDS = request(IDS, "x-request-id: mine-1")
