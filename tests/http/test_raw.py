"""What no well-behaved client sends, over raw sockets: every refusal has our JSON body and an id."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from aiohttp import web_protocol
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from gateway.options import GatewayOptions
from tests.http.served import Served, until
from tests.wire import WireAnswer, first_answer, read_answer


async def ask(server: Served, *pieces: bytes) -> WireAnswer:
    """Send the pieces, each in a packet of its own, and read until the connection closes.

    It is read all the while: a reset by a server that left a piece unread would hide what came before it.
    """
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        received = bytearray()

        async def receive() -> None:
            with suppress(ConnectionResetError):
                while part := await reader.read(1 << 16):
                    received.extend(part)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receive())
            for piece in pieces:
                if writer.is_closing():
                    break
                writer.write(piece)
                await asyncio.sleep(0.02)
        writer.close()
    return first_answer(bytes(received))


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [line, "Host: x", "x-request-id: mine", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def test_options_of_the_server_as_a_whole(server: Served) -> None:
    raw = await ask(server, request("OPTIONS * HTTP/1.1"))
    assert (raw.status, raw.headers["allow"], raw.body) == (204, "GET, HEAD, POST, OPTIONS", b"")
    assert raw.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("target", ["example.com:443", "x:80"])
async def test_connect_is_refused_and_what_follows_is_not_read(server: Served, target: str) -> None:
    raw = await ask(server, request(f"CONNECT {target} HTTP/1.1"), b"\x16\x03\x01 a TLS hello")
    assert (raw.status, raw.code, raw.headers["connection"]) == (405, "method_not_allowed", "close")
    assert raw.headers["x-request-id"] == "mine"
    await server.assert_works()


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        ("GET http://elsewhere HTTP/1.1", 404, "not_found"),
        ("GET //[/ HTTP/1.1", 404, "not_found"),
        ("GET /%zz%00 HTTP/1.1", 404, "not_found"),
        ("PROPFIND /v1/embeddings HTTP/1.1", 405, "method_not_allowed"),
        ("TRACE /v1/embeddings HTTP/1.1", 405, "method_not_allowed"),
        ("GET /v1/embeddings HTTP/1.1", 405, "method_not_allowed"),
    ],
)
async def test_targets_and_methods_that_lead_nowhere(
    server: Served, line: str, status: int, code: str
) -> None:
    raw = await ask(server, request(line))
    assert (raw.status, raw.code, raw.headers["x-request-id"]) == (status, code, "mine")
    assert raw.headers["content-type"] == "application/json"


@pytest.mark.parametrize("expect", ["200-ok", "100-continue, x", "\xff"])
@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/v1/embeddings", "error"),
        ("/embed", "error_type"),
        ("/v1/contextualizedembeddings", "detail"),
        ("/v2/embed", "message"),
        ("/health", "error"),
        ("/nowhere", "error"),
    ],
)
async def test_other_expectations_are_417_in_the_words_of_the_route(
    server: Served, path: str, key: str, expect: str
) -> None:
    raw = await ask(
        server, request(f"POST {path} HTTP/1.1", f"Expect: {expect}", "Content-Length: 2", body=b"{}")
    )
    assert (raw.status, raw.headers["x-request-id"]) == (417, "mine")
    assert key in json.loads(raw.body)
    assert raw.headers["connection"] == "close"
    await server.assert_works()


async def test_a_client_that_waits_for_100_gets_it_and_then_its_answer(server: Served) -> None:
    body = b'{"input": [5, 6, 7]}'
    head = request("POST /v1/embeddings HTTP/1.1", "Expect: 100-continue", f"Content-Length: {len(body)}")
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


HEAD = b"POST /embed HTTP/1.1\r\nHost: x\r\nx-request-id: mine\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("packets", [1, 2])
@pytest.mark.parametrize(
    "chunks", [b"5\r\nabc\r\nzz\r\n", b"zz\r\nabc\r\n", b"f" * 30 + b"\r\nabc", b"-1\r\n\r\n"]
)
async def test_a_broken_body_behind_its_head_is_told_at_once_in_the_words_of_the_route(
    server: Served, caplog: pytest.LogCaptureFixture, chunks: bytes, packets: int
) -> None:
    """aiohttp's parser fails where nobody waits; who waits would do so until the body's time is over."""
    raw = await ask(server, *((HEAD, chunks) if packets == 2 else (HEAD + chunks,)))
    assert (raw.status, raw.headers["x-request-id"], raw.headers["connection"]) == (422, "mine", "close")
    error = json.loads(raw.body)
    assert error["error_type"] == "Validation"
    assert error["error"].startswith("the body cannot be read: ")
    assert "\n" not in error["error"]
    await until(lambda: server.connections == 0)
    assert not caplog.records
    await server.assert_works()


@pytest.mark.parametrize("parser", [HttpRequestParser, HttpRequestParserPy], ids=["c", "python"])
@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD, b"-1\r\n\r\n"),
        (HEAD, b"zz\r\nabc\r\n"),
        (HEAD + b"5\r\nabcde", b"\r\nzz\r\n"),  # a chunk's end wakes its reader, with no bytes for it
        (HEAD, b"5\r\nabc", b"de\r\n", b"-1\r\n\r\n"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", HEAD, b"-1\r\n\r\n"),
    ],
)
async def test_a_broken_body_is_told_at_whatever_step_of_the_handler_it_comes(
    server: Served,
    monkeypatch: pytest.MonkeyPatch,
    parser: type,
    turns: int,
    pieces: tuple[bytes, ...],
) -> None:
    """turns: of the loop behind each piece. After one, aiohttp has begun a request, but not its handler."""
    monkeypatch.setattr(web_protocol, "HttpRequestParser", parser)
    async with asyncio.timeout(GatewayOptions().body_timeout_s / 3):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await until(lambda: server.connections == 1)
        connection: Any = server.transports[0].get_protocol()
        for piece in pieces:
            connection.data_received(piece)
            for _ in range(turns):
                await asyncio.sleep(0)
        received = await reader.read()
        writer.close()
    assert received.rpartition(b"HTTP/1.1 ")[2].startswith(b"422 ")


async def test_a_body_that_breaks_behind_its_answer_ends_the_connection(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp would read on for ten seconds, for the sake of clients that send before they read."""
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD.replace(b"/embed", b"/health"))
        assert (await read_answer(reader)).status == 405
        writer.write(b"-1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
    await until(lambda: server.connections == 0)
    assert not caplog.records


async def test_a_broken_body_behind_a_declined_upgrade_is_told_at_once(server: Served) -> None:
    """aiohttp itself parses what came in one packet with the request to upgrade."""
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(20):
        writer.write(upgrade + HEAD)
        assert (await read_answer(reader)).status == 200
        writer.write(b"zz\r\nabc\r\n")
        raw = await read_answer(reader)
    assert (raw.status, raw.headers["connection"]) == (422, "close")
    writer.close()
    await server.assert_works()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/health"])
@pytest.mark.parametrize(
    "rest",
    [
        b" HTTP/1.1\r\nHost x\r\n\r\n",
        b" HTTP/1.1\r\nHo st: x\r\n\r\n",
        b" HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
        b" HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: what\r\n\r\n",
        b" HTTP/1.1\r\nHost: x\r\n" + b"x: y\r\n" * 500 + b"\r\n",
        b" HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b" HTTP/1.1\r\n\r\n",
        b" HTTP/7\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_cannot_be_read_is_400_whatever_its_path(server: Served, path: str, rest: bytes) -> None:
    raw = await ask(server, b"POST " + path.encode() + rest)
    assert (raw.status, raw.code) == (400, "invalid_http")
    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["x-request-id"]
    assert raw.headers["connection"] == "close"
    await server.assert_works()


@pytest.mark.parametrize(
    ("codings", "status"),
    [("gzip, chunked", 501), ("GZIP,chunked", 501), ("identity, chunked", 501), ("Chunked", 200)],
)
async def test_a_transfer_coding_that_is_not_known_is_501(server: Served, codings: str, status: int) -> None:
    chunks = b'e\r\n{"input": [5]}\r\n0\r\n\r\n'
    lines = ("POST /v1/embeddings HTTP/1.1", f"Transfer-Encoding: {codings}")
    raw = await ask(server, request(*lines, body=chunks))
    assert raw.status == status
    if status == 501:
        assert raw.code == "unknown_transfer_coding"
        assert raw.value["error"]["message"].startswith(f"Transfer-Encoding is {codings!r}")
        assert raw.headers["connection"] == "close"
    await server.assert_works()


async def test_strays_are_counted_under_no_path_of_theirs(server: Served) -> None:
    await ask(server, request("CONNECT x:80 HTTP/1.1"))
    await ask(server, b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n")
    page = (await server.send("GET", "/metrics")).body.decode()
    assert 'ivy_errors_total{code="invalid_http"} 1' in page
    assert 'ivy_errors_total{code="method_not_allowed"} 1' in page
    assert 'ivy_requests_total{route="other",status="405"} 1' in page
    assert "pot" not in page


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_offers_to_upgrade_are_passed_over(server: Served, protocol: str) -> None:
    """Some clients offer HTTP/2 with every first request."""
    body = b'{"input": [5, 6, 7]}'
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        f"Upgrade: {protocol}\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.encode() + body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_good_request_is_answered_whatever_comes_behind_it(server: Served) -> None:
    body = b'{"input": [5, 6, 7]}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    for good in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", head + body):
        raw = await ask(server, good + b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n")
        assert raw.status == 200


SEEDS = (
    request("POST /v1/embeddings HTTP/1.1", "Content-Length: 14", body=b'{"input": [5]}'),
    HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n") + b'e\r\n{"inputs":[5]}\r\n0\r\n\r\n',
    request("OPTIONS * HTTP/1.1"),
    request("CONNECT x:80 HTTP/1.1"),
    request("GET /health HTTP/1.0", "Upgrade: websocket"),
)
PIECES = (
    *(
        b"\r\n",
        b"\x00",
        b"\xff",
        b" ",
        b":",
        b"*",
        b"//",
        b"?",
        b"#",
        b"%",
        b"[",
        b"HTTP/1.1",
        b"Host: y\r\n",
    ),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: x\r\n", b"Upgrade: h2c\r\n"),
    *(
        b"Content-Encoding: gzip\r\n",
        b"Content-Type: a/b;;\r\n",
        b"Authorization: \xff\r\n",
        b"Accept: \xff\r\n",
    ),
)


def damaged(random: Random) -> bytes:
    """A seed with up to four changes."""
    data = bytearray(random.choice(SEEDS))
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(data))
        line = data.find(b"\r\n") + 2
        match random.randrange(4):
            case 0:
                data[place:place] = random.choice(PIECES)
            case 1:
                data[line:line] = random.choice(PIECES)
            case 2:
                data[place] = random.randrange(256)
            case 3:
                del data[place : place + random.randint(1, 5)]
    return bytes(data)


async def send_and_leave(server: Served, random: Random) -> bytes:
    """What comes back for damaged bytes in two packets, soon or never."""
    data = damaged(random)
    cut = random.randrange(len(data))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    received = b""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(0.5):
            for piece in (data[:cut], data[cut:]):
                writer.write(piece)
                await asyncio.sleep(0.002)
            while piece := await reader.read(1 << 16):
                received += piece
    writer.close()
    return received


@pytest.mark.parametrize("seed", range(5))
async def test_damaged_requests_get_our_answers_or_none(
    server: Served, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    randoms = [Random(seed * 1000 + number) for number in range(50)]
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(send_and_leave(server, random) for random in randoms))
    assert sum(map(bool, answers)) > 10
    for answer in answers:
        assert b"text/plain" not in answer
        assert b" 500 " not in answer
    assert not caplog.records
    await server.assert_works()
