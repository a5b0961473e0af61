"""Plain requests pass aiohttp's parser and writer by; what is answered must not show it.

Each test sends the same bytes to two servers, one of which leaves everything to aiohttp.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway import express
from gateway.app import create_app
from gateway.exchange import PLAIN_ROUTES
from gateway.express import ExpressConnection
from gateway.listener import prepare
from gateway.options import GatewayOptions
from rose.errors import StepError
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info
from tests.http.served import byte_tokenizer, serving, until

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
async def opened(*, short: bool, service_s: float | None = 0.0, **options: Any) -> AsyncIterator[Way]:
    engine = FakeEngine(info=fake_info(), service_s=service_s)
    batcher = Batcher(engine, SchedulerOptions())
    await batcher.start()
    app = create_app(GatewayOptions(**options), batcher, engine.info, byte_tokenizer())
    if not short:
        app._state.pop(PLAIN_ROUTES)
    runner = await prepare(app)
    way = Way(runner, engine, batcher)
    try:
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


@pytest.fixture(autouse=True)
def _hold_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express, "_HOLD_S", 0.005)


BLOCK = {"input_ids": b"\x05\0\0\0\x06\0\0\0", "lengths": b"\x01\0\0\0\x01\0\0\0"}
PLAIN = {
    "ids": request(IDS),
    "text": request({"input": "hello"}),
    "texts, base64": request({"input": ["a", "b"], "encoding_format": "base64"}),
    "block": request(BLOCK, media="msgpack"),
    "block as json": request(BLOCK, "Accept: application/json", media="msgpack"),
    "octets": request({**IDS, "encoding_format": "bytes"}),
    "own id": request(IDS, "x-request-id: mine-1"),
    "odd id": request(IDS, "x-request-id: a b"),
    "names in capitals": request(IDS, "ACCEPT: */*", "X-Request-ID: mine"),
    "kept alive": request(IDS, "Connection: Keep-Alive", "Accept-Encoding: gzip", "User-Agent: me/1 (x; y)"),
    "an empty value": request(IDS, "x-empty:"),
    "other dialect": request({"inputs": "x"}, path="/embed"),
    "wrong value": request({"input": []}),
    "wrong value, 422": request({"inputs": [[]]}, path="/embed"),
    "broken body": request(b"{"),
    "other media": request(IDS, media="json").replace(b"application/json", b"text/css"),
    "unknown model": request({**IDS, "model": "none"}),
    "too long": request({"input": [1] * 600}),
    "odd timeout": request(IDS, "x-request-timeout-ms: soon"),
}
OTHER = {
    "path with a query": request(IDS, path="/v1/embeddings?x=1"),
    "encoded path": request(IDS, path="/v1/%65mbeddings"),
    "no such path": request(IDS, path="/nowhere"),
    "GET": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.0": request(IDS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "closing": request(IDS, "Connection: close"),
    "unknown header": request(IDS, "Cookie: a=b"),
    "chunked": request(IDS, "Transfer-Encoding: chunked"),
    "expects": request(IDS, "Expect: 100-continue"),
    "gzip": request(gzip.compress(json.dumps(IDS).encode(), mtime=0), "Content-Encoding: gzip"),
    "no host": request(IDS).replace(b"Host: x\r\n", b""),
    "two hosts": request(IDS, "host: y"),
    "two lengths": request(IDS, "Content-Length: 5"),
    "no length": request(IDS).replace(b"Content-Length", b"x-length"),
    "an empty body": request(b""),
    "length with a sign": request(IDS).replace(b"Length: ", b"Length: +"),
    "folded line": request(IDS, "x-a: b\r\n c"),
    "space before the colon": request(IDS, "x-a : b"),
    "bare line feeds": request(IDS).replace(b"\r\n", b"\n"),
    "a zero byte": request(IDS, "x-a: \0"),
    "no ASCII": request(IDS, "x-a: ü"),
    "a long head": request(IDS, "x-a: " + "b" * 5000),
    "too large": request({"input": "a" * 70_000}),
    "two at once": request(IDS) * 2,
    "plain, then not": request(IDS) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
}


@pytest.mark.parametrize("name", PLAIN)
async def test_plain_requests_get_the_same_answer(name: str) -> None:
    short, long, stayed = await both(PLAIN[name], PLAIN[name], max_body_bytes=1 << 16)
    assert short == long
    assert short.count(b"HTTP/1.1 ") == 2
    assert stayed


@pytest.mark.parametrize("name", OTHER)
async def test_other_requests_go_to_aiohttp(name: str) -> None:
    pieces = PLAIN["ids"], OTHER[name], PLAIN["ids"]
    short, long, stayed = await both(*pieces, apart=True, max_body_bytes=1 << 16)
    assert short == long
    assert not stayed


CLIENTS = {
    "requests": (
        "User-Agent: python-requests/2.32",
        "Accept-Encoding: gzip",
        "Accept: */*",
        "Connection: keep-alive",
    ),
    "openai": (
        "accept: application/json",
        "x-stainless-lang: python",
        "openai-project: p",
        "authorization: Bearer k",
    ),
    "node": ("connection: keep-alive", "accept-language: *", "sec-fetch-mode: cors", "user-agent: node"),
    "nginx": ("x-forwarded-for: 10.0.0.1", "via: 1.1 proxy", "forwarded: for=10.0.0.1"),
    "traced": ("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate: a=b"),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_what_common_clients_send_is_plain(name: str) -> None:
    short, long, stayed = await both(request(IDS, *CLIENTS[name]))
    assert short == long
    assert stayed


async def test_a_served_socket_takes_the_short_way() -> None:
    async with serving() as server:
        await server.assert_works()
        (connection,) = server._runner.server.connections
        assert connection._express
        assert server._runner.server.requests_count == 1


async def test_logged_requests_are_left_to_aiohttp(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "gateway.access"):
        async with opened(short=True) as way:
            assert b"200 OK" in await way.answer(PLAIN["own id"])
            assert not way.express
    assert "id=mine-1" in caplog.text


async def test_a_server_that_shuts_down_refuses_and_closes() -> None:
    answers = []
    for short in (True, False):
        async with opened(short=short) as way:
            await way.batcher.close(0.0)
            answers.append(await way.answer(PLAIN["own id"], PLAIN["own id"]))
    assert answers[0] == answers[1]
    assert answers[0].startswith(b"HTTP/1.1 503")
    assert answers[0].count(b"HTTP/1.1") == 1
    assert b"Connection: close" in answers[0]
    assert answers[0].endswith(b"<closed>")


@pytest.mark.parametrize("key", ["", "Authorization: Bearer right", "authorization: bearer wrong"])
async def test_keys_are_asked_for(key: str) -> None:
    line = [key] if key else []
    short, long, stayed = await both(request(IDS, *line), api_keys=("right",))
    assert short == long
    assert short.startswith(b"HTTP/1.1 200" if "right" in key else b"HTTP/1.1 401")
    assert stayed


async def test_a_request_may_come_in_two_pieces_cut_anywhere() -> None:
    wire = request({"input": [5, 6]}, "x-request-id: mine")
    async with opened(short=False) as long:
        expected = await long.answer(wire)
    head = wire.index(b"\r\n\r\n") + 4
    async with opened(short=True) as way:
        for cut in range(1, len(wire)):
            way.wire.written = b""
            assert await way.answer(wire[:cut], wire[cut:]) == expected, cut
            assert way.express == (cut >= head)
            way.protocol._express = True  # aiohttp has seen whole messages only


async def test_a_body_may_come_in_many_pieces() -> None:
    wire = request({"input": list(range(300))})
    short, long, stayed = await both(wire[:150], *[wire[i : i + 100] for i in range(150, len(wire), 100)])
    assert short == long
    assert stayed


_words = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=12)
_NAMES = (
    *(
        "x-a",
        "X-Request-ID",
        "Accept",
        "accept-encoding",
        "Connection",
        "Content-Type",
        "Content-Length",
        "TE",
    ),
    *("Host", "Cookie", "Transfer-Encoding", "Upgrade", "Expect", "Content-Encoding", "Authorization", "a@b"),
    *("TE", "x-request-timeout-ms"),
)
_VALUES = (
    *("application/msgpack", "gzip", "chunked", "keep-alive", "close", "100-continue", "identity", "19", "0"),
    *("*/*", "websocket"),
)
_GAPS = ("", " ", "  ", "\t")
_lines = st.lists(
    st.builds(
        "{}:{}{}".format, st.sampled_from(_NAMES), st.sampled_from(_GAPS), _words | st.sampled_from(_VALUES)
    ),
    max_size=3,
)
_bodies = st.sampled_from(
    [b'{"input":[5,6,7]}', b'{"input":"hello"}', b'{"input":""}', b"\x80", b"GET / HTTP/1.1"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_lines, _bodies, st.lists(st.integers(1, 400), max_size=3), st.booleans())
def test_odd_heads_in_odd_pieces_get_the_same_answer(
    lines: list[str], body: bytes, cuts: list[int], again: bool
) -> None:
    wire = request(body, *lines) + request(IDS) * again
    bounds = [0, *sorted(cuts), len(wire)]
    pieces = [wire[start:end] for start, end in pairwise(bounds) if start < end]
    short, long, _ = asyncio.run(both(*pieces))
    assert short == long


@pytest.mark.parametrize("extra", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", request(IDS) * 3])
async def test_what_is_sent_before_the_answer_is_answered_after_it(extra: bytes) -> None:
    answers = []
    for short in (True, False):
        async with opened(short=short, service_s=None) as way:
            way.feed(PLAIN["own id"])
            await quiet(way, 5)
            way.feed(*[bytes([byte]) for byte in extra])
            async with asyncio.timeout(10):
                while not way.wire.written:
                    way.engine.finish(len(way.engine.running))
                    await asyncio.sleep(0)
            way.engine._service_s = 0.0
            answers.append(await way.answer())
    assert answers[0] == answers[1]
    assert answers[0].count(b"HTTP/1.1 200") == 1 + extra.count(b"HTTP/1.1")


async def test_a_client_that_sends_on_without_end_is_read_no_more() -> None:
    async with opened(short=True, service_s=None) as way:
        way.feed(PLAIN["ids"])
        await quiet(way, 5)
        while not way.wire.paused_reading:
            way.feed(b"a" * 10_000)
            assert sum(map(len, way.protocol._held)) < 100_000
        way.engine.finish()
        assert b" 400 Bad Request" in await way.answer()
        assert not way.wire.paused_reading


@pytest.mark.parametrize("phase", ["gathering", "running", "draining"])
async def test_a_client_may_leave_at_any_time(phase: str) -> None:
    async with opened(short=True, service_s=None) as way:
        if phase == "draining":
            way.protocol.pause_writing()
        way.feed(PLAIN["ids"][:-1] if phase == "gathering" else PLAIN["ids"])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(way.engine.running) == (phase != "gathering")
        if phase == "draining":
            way.engine.finish()
            await until(lambda: way.wire.written != b"")
        way.protocol.connection_lost(None)
        way.wire.closed = True
        await until(lambda: way.protocol._running is None)
        await asyncio.sleep(0.01)  # longer than a body is held
        assert bool(way.wire.written) == (phase == "draining")
        state = [asyncio.all_tasks(), way.protocol._held]
        assert len(state[0]) <= 2, state  # this one and the scheduler's
        assert state[1] == []


async def test_a_client_that_does_not_read_gets_its_next_answer_when_it_does() -> None:
    async with opened(short=True) as way:
        way.protocol.pause_writing()
        way.feed(PLAIN["ids"])
        await until(lambda: way.wire.written != b"")
        way.feed(PLAIN["ids"])
        for _ in range(50):
            await asyncio.sleep(0)
        assert way.wire.written.count(b"HTTP/1.1 200") == 1
        way.protocol.resume_writing()
        assert (await way.answer()).count(b"HTTP/1.1 200") == 2


async def test_a_shutdown_waits_for_the_answer() -> None:
    async with opened(short=True, service_s=None) as way:
        way.feed(PLAIN["ids"])
        await quiet(way, 5)
        closing = asyncio.ensure_future(way.runner.cleanup())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done() and not way.wire.closed
        way.engine.finish()
        async with asyncio.timeout(10):
            await closing
        assert way.wire.written.startswith(b"HTTP/1.1 200")
        assert way.wire.closed


@pytest.mark.parametrize("short", [True, False])
async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(short: bool) -> None:
    async with opened(short=short, service_s=None, keepalive_timeout_s=0.05) as way:
        way.feed(PLAIN["ids"])
        await asyncio.sleep(0.15)
        assert not way.wire.closed
        way.engine.finish()
        await until(lambda: way.wire.written != b"")
        assert not way.wire.closed
        await until(lambda: way.wire.closed)


async def test_a_failed_step_is_told_as_ever() -> None:
    answers = []
    for short in (True, False):
        async with opened(short=short) as way:
            way.engine.fail_next(StepError("no"))
            answers.append(await way.answer(PLAIN["own id"], PLAIN["own id"]))
    assert answers[0] == answers[1]
    assert answers[0].startswith(b"HTTP/1.1 500")


async def test_a_large_answer_is_whole() -> None:
    wire = request({"input": [[5, 6]] * 2000})
    short, long, stayed = await both(wire)
    assert short == long
    assert len(short) > 100_000
    assert stayed
