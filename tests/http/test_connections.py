"""Connections that stay open, that close, and the heads of their answers."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from tests.http.served import Served

BODY = json.dumps({"input": [5, 6, 7]}).encode()
HEAD = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: str, more: str = ""
) -> tuple[str, dict[str, str], bytes]:
    """One request: status line, headers (names in lower case) and body of its answer."""
    writer.write(f"POST /v1/embeddings {version}\r\n{HEAD}{more}\r\n".encode() + BODY)
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = [line.split(": ", 1) for line in head[1:-2]]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs)  # none twice
        return head[0], headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize(
    ("version", "more", "connection"),
    [
        ("HTTP/1.1", "", None),
        ("HTTP/1.1", "Connection: close\r\n", "close"),
        ("HTTP/1.0", "", None),
        ("HTTP/1.0", "Connection: keep-alive\r\n", "keep-alive"),
    ],
)
async def test_a_connection_stays_open_if_the_client_wants_it(
    server: Served, version: str, more: str, connection: str | None
) -> None:
    stays = more.endswith("keep-alive\r\n") or (version == "HTTP/1.1" and not more)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(2 if stays else 1):
        status, headers, body = await ask(reader, writer, version, more)
        assert status == f"{version} 200 OK"
        assert headers.get("connection") == connection
        assert headers["content-type"] == "application/json"
        assert {"date", "server", "x-request-id", "x-total-time", "x-inference-time"} <= set(headers)
        assert headers["date"].endswith(" GMT")
        assert json.loads(body)["usage"]["prompt_tokens"] == 3
    if not stays:
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    writer.close()


async def test_small_answers_are_not_held_back(server: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await ask(reader, writer, "HTTP/1.1")
    (transport,) = server.transports
    accepted = transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
