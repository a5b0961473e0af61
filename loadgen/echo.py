"""A server that only answers: what is measured against it is the client, the loopback and a little Python.

`python -m loadgen echo --port 8200`; it speaks every wire format, its vectors are constant.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any, cast

import msgspec
import numpy as np
import uvloop

from loadgen.http1 import HEAD_END
from loadgen.plan import LoadgenError

DIMENSIONS = 1024
START_S = 20.0


class EchoProtocol(asyncio.Protocol):
    """One connection; requests one after another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._buffer += data
        while (found := self._buffer.find(HEAD_END)) >= 0:
            head = bytes(self._buffer[:found]).lower() + b"\r\n"
            start = found + len(HEAD_END)
            at = head.find(b"\r\ncontent-length:")
            end = start + (int(head[at + 17 : head.index(b"\r\n", at + 17)]) if at >= 0 else 0)
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[start:end])
            del self._buffer[:end]
            if self._transport is not None:
                self._transport.write(answer(head, body))


def answer(head: bytes, body: bytes) -> bytes:
    """A whole response to a request with the lower-case `head`."""
    if head.startswith(b"get "):
        return _response(200, b"application/json", b"{}")
    try:
        if b"msgpack" in head:
            request = msgspec.msgpack.decode(body)
            rows = len(request["lengths"]) // 4 if "lengths" in request else len(request["input"])
            return _msgpack(rows)
        request = msgspec.json.decode(body)
        return _tei(len(request["inputs"])) if b" /embed " in head else _openai(len(request["input"]))
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        return _response(400, b"application/json", msgspec.json.encode({"error": {"message": str(error)}}))


@lru_cache(64)
def _msgpack(rows: int) -> bytes:
    body = {
        "dtype": "float32",
        "shape": [rows, DIMENSIONS],
        "embeddings": _vectors(rows).tobytes(),
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    }
    return _response(200, b"application/msgpack", msgspec.msgpack.encode(body))


@lru_cache(64)
def _openai(rows: int) -> bytes:
    vector = base64.b64encode(_vectors(1).tobytes()).decode()
    items = [{"object": "embedding", "index": row, "embedding": vector} for row in range(rows)]
    return _response(200, b"application/json", msgspec.json.encode({"object": "list", "data": items}))


@lru_cache(64)
def _tei(rows: int) -> bytes:
    return _response(200, b"application/json", msgspec.json.encode(_vectors(rows).tolist()))


def _vectors(rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.full((rows, DIMENSIONS), DIMENSIONS**-0.5, "<f4")


def _response(status: int, content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    return head % (status, content_type, len(body)) + body


async def serve(port: int, started: Pipe | None = None) -> None:
    """Listen on loopback until cancelled; the port goes to `started`, or to stdout."""
    server = await asyncio.get_running_loop().create_server(EchoProtocol, "127.0.0.1", port)
    bound = server.sockets[0].getsockname()[1]
    if started is None:
        sys.stdout.write(f"echo at http://127.0.0.1:{bound}\n")
        sys.stdout.flush()
        await server.serve_forever()
    else:
        started.send(bound)
        # The pipe closes when whoever started this leaves or dies.
        await asyncio.get_running_loop().run_in_executor(None, _until_closed, started)


def _until_closed(pipe: Pipe) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv()


def _process(pipe: Pipe) -> None:
    uvloop.run(serve(0, pipe))


@contextlib.contextmanager
def running() -> Iterator[int]:
    """An echo server in a process of its own, while the block runs. Yields its port.

    Raises:
        LoadgenError: it does not start.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise LoadgenError(f"the echo server did not start in {START_S:g} s")
        yield ours.recv()
    finally:
        ours.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
