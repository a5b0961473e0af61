"""What the benchmarks of one request after another share: a client on one plain socket."""

from __future__ import annotations

import socket
import sys

import msgspec
import numpy as np

STAGES = (b"x-total-time", b"x-queue-time", b"x-inference-time")


def connect(address: tuple[str, int]) -> socket.socket:
    """A connection that sends at once."""
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def request_of(model: str, vocab_size: int, count: int, length: int, more: str = "") -> bytes:
    """A whole HTTP request: `count` sequences of `length` ids in one msgpack block. more: header lines."""
    ids = np.random.default_rng(count).integers(0, vocab_size, count * length).astype("<i4")
    lengths = np.full(count, length, "<i4").tobytes()
    body = msgspec.msgpack.encode({"model": model, "input_ids": ids.tobytes(), "lengths": lengths})
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost:8000\r\nContent-Type: application/msgpack\r\n"
    return f"{head}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def exchange(connection: socket.socket, wire: bytes) -> bytes:
    """Send one request; the head of its answer, in small letters, once its body is in.

    On a connection that does not block it polls.

    Raises:
        RuntimeError: the answer is no vectors, or the server has closed the connection.
    """
    connection.sendall(wire)
    head, received, left = b"", bytearray(), sys.maxsize
    while left > 0:
        try:
            part = connection.recv(1 << 20)
        except BlockingIOError:
            continue
        if not part:
            raise RuntimeError("the server has closed the connection")
        if head:
            left -= len(part)
            continue
        received += part
        if (end := received.find(b"\r\n\r\n")) >= 0:
            head = bytes(received[: end + 4]).lower()
            if not head.startswith(b"http/1.1 200"):
                raise RuntimeError(received.decode(errors="replace"))
            left = int(_header(head, b"content-length")) - (len(received) - len(head))
    return head


def stages_us(head: bytes) -> tuple[float, float, float]:
    """What the server says of its time, in µs: all of it, in the queue, from launch to rows."""
    total, queue, inference = (1e3 * float(_header(head, name)) for name in STAGES)
    return total, queue, inference


def _header(head: bytes, name: bytes) -> bytes:
    return head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]
