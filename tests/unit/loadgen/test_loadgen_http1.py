from __future__ import annotations

import asyncio

import pytest

from loadgen.http1 import Connection, ConnectionLostError, get_bytes, request_bytes

PLAIN = b"HTTP/1.1 200 OK\r\nX-Queue-Time: 1.5\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n"
    # A chunk whose end looks like the end of the body.
    b"7\r\nhe0\r\n\r\n\r\n"
    b"3;x=y\r\nllo\r\n0\r\n\r\n"
)


class Wire(asyncio.Transport):
    """Takes what is written. closing: whether it was closed."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True


def opened() -> tuple[Connection, Wire]:
    connection, wire = Connection(), Wire()
    connection.connection_made(wire)
    return connection, wire


@pytest.mark.parametrize(
    ("raw", "body", "status"), [(PLAIN, b"hello", 200), (CHUNKED, b"he0\r\n\r\nllo", 201)]
)
async def test_a_response_cut_anywhere_is_read(raw: bytes, body: bytes, status: int) -> None:
    for cut in range(1, len(raw)):
        connection, _ = opened()
        waiting = connection.send(b"x")
        connection.data_received(raw[:cut])
        assert not waiting.done()
        connection.data_received(raw[cut:])
        response = waiting.result()
        assert (response.status, response.body) == (status, body)
        assert connection.usable and connection.sent_s == 0.0


async def test_bytes_go_out_as_they_are_and_requests_follow_each_other() -> None:
    connection, wire = opened()
    for _ in range(3):
        waiting = connection.send(b"request")
        assert not connection.usable and connection.sent_s > 0.0
        connection.data_received(PLAIN)
        assert waiting.result().header("x-queue-TIME") == "1.5"
        assert waiting.result().header("none") is None
    assert wire.written == b"request" * 3


@pytest.mark.parametrize(("error", "words"), [(None, "closed"), (ConnectionResetError(), "reset")])
async def test_a_lost_connection_fails_its_request(error: Exception | None, words: str) -> None:
    connection, _ = opened()
    waiting = connection.send(b"x")
    connection.connection_lost(error)
    with pytest.raises(ConnectionLostError, match=words):
        await waiting
    with pytest.raises(ConnectionLostError):
        connection.send(b"x")


async def test_a_server_that_closes_is_believed() -> None:
    connection, wire = opened()
    waiting = connection.send(b"x")
    connection.data_received(PLAIN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert waiting.result().body == b"hello"
    assert wire.closing and not connection.usable


async def test_a_response_without_a_length_is_refused() -> None:
    connection, wire = opened()
    waiting = connection.send(b"x")
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(ConnectionLostError, match="without a length"):
        await waiting
    assert wire.closing


async def test_an_abort_says_why() -> None:
    connection, wire = opened()
    waiting = connection.send(b"x")
    connection.abort("no answer in 1 s")
    with pytest.raises(ConnectionLostError, match="no answer in 1 s"):
        await waiting
    assert wire.closing


def test_requests_are_whole() -> None:
    wire = request_bytes("127.0.0.1:1", "/v1/embeddings", "application/msgpack", b"abc", "key")
    head, body = wire.split(b"\r\n\r\n")
    assert body == b"abc"
    assert head.split(b"\r\n")[0] == b"POST /v1/embeddings HTTP/1.1"
    assert {b"Content-Length: 3", b"Authorization: Bearer key", b"Host: 127.0.0.1:1"} <= set(
        head.split(b"\r\n")
    )
    assert get_bytes("h", "/info").endswith(b"\r\n\r\n") and b"Authorization" not in get_bytes("h", "/info")
