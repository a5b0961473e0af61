"""Clients that send too slowly, a connection's first request or a later one: none holds it for long."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.options import GatewayOptions
from tests.fakes import FakeEngine, fake_info
from tests.http.served import Served, serving, until
from tests.wire import read_answer

BODY = json.dumps({"input": [5, 6, 7]}).encode()
HEAD = (
    b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
# What a test waits for is a twentieth of this, and what it must not wait for twenty times as long.
FAR_S = 60.0


@asynccontextmanager
async def impatient(
    head_s: float = FAR_S, body_s: float = FAR_S, idle_s: float = FAR_S
) -> AsyncIterator[Served]:
    options = GatewayOptions(head_timeout_s=head_s, body_timeout_s=body_s, keepalive_timeout_s=idle_s)
    async with serving(options) as server, asyncio.timeout(20):
        yield server


async def drip(writer: asyncio.StreamWriter, data: Iterator[bytes]) -> None:
    """A few bytes at a time, until the server has had enough."""
    with suppress(ConnectionError):
        for piece in data:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)


def endless_head() -> Iterator[bytes]:
    yield b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\n"
    while True:
        yield b"x: y\r\n"


def endless_body() -> Iterator[bytes]:
    yield b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    while True:
        yield b" "


async def connected(server: Served, earlier: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which `earlier` requests were served."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(earlier):
        writer.write(HEAD + BODY)
        assert (await read_answer(reader)).status == 200
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection closes; what the client sent after that is answered with a reset."""
    rest = b""
    with suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            rest += piece
    return rest


@pytest.mark.parametrize("earlier", [0, 1, 3])
@pytest.mark.parametrize(
    ("limits", "data", "code"),
    [({"head_s": 0.2}, endless_head, "head_timeout"), ({"body_s": 0.2}, endless_body, "body_timeout")],
    ids=["head", "body"],
)
async def test_what_drips_in_is_408_and_the_connection_closes(
    limits: dict[str, float], data: object, code: str, earlier: int
) -> None:
    assert callable(data)
    async with impatient(**limits) as server:
        reader, writer = await connected(server, earlier)
        dripping = asyncio.ensure_future(drip(writer, data()))
        answer = await read_answer(reader)
        assert (answer.status, answer.code) == (408, code)
        assert "0.2 s" in answer.value["error"]["message"]
        assert answer.headers["connection"] == "close"
        assert answer.headers["x-request-id"]
        dripping.cancel()
        if code == "head_timeout":  # of a body aiohttp reads on for 10 s, so that the client sees the answer
            assert await rest_of(reader) == b""
        writer.close()
        await until(lambda: server.connections == 0)
        await server.assert_works()


@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_head_that_stops_is_408_too(earlier: int) -> None:
    async with impatient(head_s=0.2) as server:
        reader, writer = await connected(server, earlier)
        writer.write(HEAD[:20])
        assert (await read_answer(reader)).status == 408
        assert await reader.read() == b""
        writer.close()


FIRST = {
    "plain": HEAD + BODY,
    "not plain": HEAD.replace(b"Host: x", b"Host: x\r\nCookie: a") + BODY,
    "chunked": HEAD.replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked")
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "no body": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("when", ["with it", "behind the end of it", "while it is served"])
async def test_a_head_that_begins_before_the_answer_to_the_request_before_is_408_too(
    first: bytes, when: str
) -> None:
    # Where the first head is cut a machine that stands still between its pieces must not end its time.
    in_head = first == FIRST["no body"] and when == "behind the end of it"
    async with impatient(head_s=2.0 if in_head else 0.2) as server:
        server.engine._service_s = 0.03
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        if when == "with it":
            writer.write(first + HEAD[:20])
        else:
            cut = len(first) - (10 if when == "behind the end of it" else 0)
            writer.write(first[:cut])
            await asyncio.sleep(0.01)
            writer.write(first[cut:] + HEAD[:20])
        assert (await read_answer(reader)).status == 200
        assert (await read_answer(reader)).code == "head_timeout"
        assert await reader.read() == b""
        writer.close()


@pytest.mark.timed
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
async def test_a_client_that_is_idle_is_in_no_head(first: bytes) -> None:
    """Also one whose request came in pieces: it is not told of a head that did not come."""
    async with impatient(head_s=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for cut in (0, 1, len(first) - 1):
            writer.write(first[:cut])
            await asyncio.sleep(0.002)
            writer.write(first[cut:])
            assert (await read_answer(reader)).status == 200
            await asyncio.sleep(0.1)
        writer.close()


async def test_a_head_that_stops_before_its_connection_is_accepted_is_408_too() -> None:
    async with impatient(head_s=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as early:
            early.sendall(HEAD[:1])
            reader, writer = await asyncio.open_connection(sock=early)
            assert (await read_answer(reader)).status == 408
            assert await reader.read() == b""
            writer.close()


async def test_a_head_in_pieces_within_the_limit_is_served() -> None:
    async with impatient(head_s=5.0) as server:
        reader, writer = await connected(server, 0)
        for _ in range(2):
            for start in range(0, len(HEAD), 40):
                writer.write(HEAD[start : start + 40])
                await asyncio.sleep(0.005)
            writer.write(BODY)
            assert (await read_answer(reader)).status == 200
        writer.close()


@pytest.mark.timed
async def test_a_timer_of_a_head_that_came_does_not_end_a_long_request() -> None:
    async with impatient(head_s=0.1) as server:
        reader, writer = await connected(server, 0)
        for piece in (HEAD[:30], HEAD[30:], BODY[:5]):
            writer.write(piece)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # its body has a limit of its own
        writer.write(BODY[5:])
        assert (await read_answer(reader)).status == 200
        writer.close()


@pytest.mark.parametrize("earlier", [0, 2])
async def test_a_connection_on_which_nothing_comes_is_closed(earlier: int) -> None:
    async with impatient(idle_s=0.2) as server:
        reader, writer = await connected(server, earlier)
        assert await reader.read() == b""
        await until(lambda: server.connections == 0)
        writer.close()


@pytest.mark.timed
async def test_an_idle_connection_outlives_the_limits_of_heads_and_bodies() -> None:
    async with impatient(head_s=0.05, body_s=0.05) as server:
        reader, writer = await connected(server, 1)
        await asyncio.sleep(0.3)
        writer.write(HEAD + BODY)
        assert (await read_answer(reader)).status == 200
        writer.close()


async def test_a_head_begun_behind_two_requests_at_once_is_closed_as_idle() -> None:
    """Where the second of them ends is not known."""
    async with impatient(head_s=0.2, idle_s=1.0) as server:
        reader, writer = await connected(server, 0)
        writer.write(2 * (HEAD + BODY) + HEAD[:20])
        for _ in range(2):
            assert (await read_answer(reader)).status == 200
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


@asynccontextmanager
async def large_answer(idle_s: float) -> AsyncIterator[tuple[Served, asyncio.StreamReader]]:
    """A server, and a client that has asked for 32 MB, more than sockets hold, and has read nothing yet."""
    options = GatewayOptions(keepalive_timeout_s=idle_s, max_items=8192)
    engine = FakeEngine(info=fake_info(dimensions=1024))
    async with asyncio.timeout(30), serving(options, engine=engine) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 16)
        body = json.dumps({"input": [[1]] * 8192, "encoding_format": "bytes"}).encode()
        head = HEAD.replace(b"Content-Length: %d" % len(BODY), b"Content-Length: %d" % len(body))
        writer.write(head + body)
        yield server, reader
        writer.close()


async def test_a_client_that_takes_nothing_of_its_answer_is_dropped() -> None:
    async with large_answer(idle_s=0.2) as (server, reader):
        await until(lambda: server.connections == 1)
        await until(lambda: server.connections == 0)
        taken = 0
        with suppress(ConnectionError):
            while piece := await reader.read(1 << 20):
                taken += len(piece)
        assert taken < 8192 * 1024 * 4
        assert (await server.embed({"input": [1]})).status == 200


@pytest.mark.timed
async def test_a_client_that_takes_its_answer_slowly_gets_all_of_it() -> None:
    async with large_answer(idle_s=0.5) as (_, reader):
        await reader.readuntil(b"\r\n\r\n")
        taken = 0
        while taken < 8192 * 1024 * 4:
            taken += len(await reader.read(1 << 16))
            if taken % (1 << 20) < 1 << 16:
                await asyncio.sleep(0.05)
        assert taken == 8192 * 1024 * 4
