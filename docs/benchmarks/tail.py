"""Where the slowest requests of a sequential client spend their time: in the server, or on the way to it.

    python docs/benchmarks/tail.py [--model NAME ...] [--lengths 128,512] [--rounds 2000] [-- FLAGS]

One server a model, with FLAGS; one client on one plain socket, which sleeps until its answer comes, then
one that polls for it. Microseconds: "took" as the client sees it, and what of it was "inference" (a batch's
launch to its rows), "queue" and "gateway" as the server says in its headers, and "outside": kernel, socket
and client. First the quantiles of each by itself, then their means over the requests of one band of "took".
"ran behind": milliseconds that the server's loop was ready and another thread had its core, by the kernel's
count.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from serving import Server

PARTS = ("took", "outside", "gateway", "queue", "inference")
QUANTILES = (0.5, 0.9, 0.99)
BANDS = ((0.0, 0.5), (0.5, 0.9), (0.9, 0.98), (0.98, 1.0))
WARM_ROUNDS = 150
# Ids that every vocabulary has.
LEAST_ID, IDS = 1000, 20_000
DUMMY = ("--load-format", "dummy", "--device", "cuda")


def request_of(model: str, length: int) -> bytes:
    """A whole HTTP request: one sequence of `length` ids."""
    ids = np.random.default_rng(length).integers(LEAST_ID, LEAST_ID + IDS, length).astype("<i4")
    lengths = np.array([length], "<i4").tobytes()
    body = msgspec.msgpack.encode({"model": model, "input_ids": ids.tobytes(), "lengths": lengths})
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def exchange(connection: socket.socket, wire: bytes) -> bytes:
    """Send one request; the head of its answer, once its body is in."""
    connection.sendall(wire)
    received, whole, head = bytearray(), sys.maxsize, b""
    while len(received) < whole:
        try:
            received += connection.recv(1 << 20)
        except BlockingIOError:
            continue
        if not head and (end := received.find(b"\r\n\r\n")) >= 0:
            head = bytes(received[: end + 4]).lower()
            whole = len(head) + int(header(head, b"content-length"))
    if not head.startswith(b"http/1.1 200"):
        raise SystemExit(received.decode(errors="replace"))
    return head


def header(head: bytes, name: bytes) -> float:
    """A number that the server says."""
    return float(head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0])


def measure(address: tuple[str, int], wire: bytes, rounds: int, *, polled: bool) -> np.ndarray:
    """f64[rounds, PARTS], µs, a row a request."""
    rows = []
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(WARM_ROUNDS):
            exchange(connection, wire)
        connection.setblocking(not polled)
        for _ in range(rounds):
            started = time.perf_counter()
            head = exchange(connection, wire)
            took = 1e6 * (time.perf_counter() - started)
            names = (b"x-total-time", b"x-queue-time", b"x-inference-time")
            total, queue, inference = (1e3 * header(head, name) for name in names)
            rows.append((took, took - total, total - queue - inference, queue, inference))
    return np.array(rows)


def waited_ms(pid: int) -> float:
    """Milliseconds that a process's first thread was ready and did not run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e6


def _tail(times: np.ndarray) -> float:
    """p99 over p50."""
    return float(np.quantile(times, 0.99) / np.quantile(times, 0.5))


def show(title: str, rows: np.ndarray, behind_ms: float) -> None:
    """Two tables."""
    took, own = rows[:, 0], rows[:, 2:].sum(axis=1)
    print(f"\n{title}: p99 is {_tail(took):.2f} times p50; of the server's own {_tail(own):.2f};", end=" ")
    print(f"ran behind {behind_ms:.2f} ms")
    print(f"{'':>12}" + "".join(f"{name:>11}" for name in PARTS))
    for quantile in QUANTILES:
        line = np.quantile(rows, quantile, axis=0)
        print(f"{f'p{100 * quantile:.0f}':>12}" + "".join(f"{value:11.1f}" for value in line))
    ordered = rows[np.argsort(took)]
    for first, last in BANDS:
        band = ordered[int(first * len(rows)) : int(last * len(rows))]
        means = [statistics.fmean(column) for column in band.T]
        print(f"{f'{first:.0%} to {last:.0%}':>12}" + "".join(f"{value:11.1f}" for value in means))


def main() -> None:
    """Measure and print."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", action="append", help="a preset; repeatable")
    parser.add_argument("--lengths", default="128,512", help="tokens of a request's one sequence")
    parser.add_argument("--rounds", type=int, default=2000, help="requests of each length and client")
    parser.add_argument("flags", nargs="*", help=f"flags of server.py (default: {' '.join(DUMMY)})")
    arguments = parser.parse_args()
    for model in arguments.model or ("pplx-embed", "bge-m3"):
        with Server("--model", model, *(arguments.flags or DUMMY)) as server:
            for length in map(int, arguments.lengths.split(",")):
                for polled in (False, True):
                    before_ms = waited_ms(server.pid)
                    wire = request_of(model, length)
                    rows = measure((server.host, server.port), wire, arguments.rounds, polled=polled)
                    how = "polling" if polled else "sleeping"
                    show(f"{model}, 1x{length}, {how} client", rows, waited_ms(server.pid) - before_ms)


if __name__ == "__main__":
    main()
