"""What the HTTP side costs: requests a second and microseconds each, before an engine that costs nothing.

python docs/benchmarks/gateway.py [--seconds 4] [--in-flight 64] [--output FILE.json]

The server is one process; its clients are raw asyncio protocols in another. Every request holds one 16-token
input, or many of 50 in the cases that say so. "server_us" is the server process's CPU time a request, so it
does not depend on the client's speed; "input_us" is that by input, its vector's way into the socket included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast
from urllib.request import urlopen

import msgspec
import numpy as np
import uvloop
from as_served import LOOP

from gateway.app import create_app
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.process import quiet_collector
from gateway.tokenization.base import SpecialTokens
from rose.batch import BatchResult, EngineInfo, Int32, RaggedBatch
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions

DIMENSIONS = 1024
ACCEPT_S = 0.2
LAG_PERIOD_S = 0.002
INFO = EngineInfo("null", "null", "float32", "cpu", DIMENSIONS, 30_000, 512, 16_384, 256, "mean", True)


class NullStep:
    """A result that was there at once."""

    done = True

    def __init__(self, outcome: BatchResult) -> None:
        self._outcome = outcome

    def result(self) -> BatchResult:
        """The vectors."""
        return self._outcome

    def __await__(self) -> Generator[object, None, BatchResult]:
        yield from ()
        return self._outcome


class NullEngine:
    """Answers every batch with the same vectors."""

    info = INFO

    def __init__(self) -> None:
        rows = np.random.default_rng(0).standard_normal((INFO.max_batch_seqs, DIMENSIONS))
        self._rows = rows.astype(np.float32)

    def step(self, batch: RaggedBatch) -> NullStep:
        """The same rows for every batch."""
        return NullStep(BatchResult(self._rows[: batch.num_seqs]))

    def stats(self) -> Mapping[str, object]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Nothing to free."""


class ByteTokenizer:
    """One id a byte: the cost of the HTTP side with text, without that of a tokenizer."""

    vocab_size = 256
    speedup = 1.0
    special_tokens = SpecialTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        """UTF-8 bytes as ids."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


@dataclass(frozen=True)
class Case:
    """A request as it goes over the wire, and the content type of its body."""

    name: str
    body: bytes
    content_type: str = "application/json"
    num_inputs: int = 1

    @property
    def wire(self) -> bytes:
        """The whole request."""
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: {self.content_type}\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body


def _bulk(num_inputs: int, length: int) -> Case:
    """Blocks of ids, as a client sends them that fills an index."""
    ids = np.random.default_rng(0).integers(0, INFO.vocab_size, num_inputs * length).astype("<i4")
    lengths = np.full(num_inputs, length, "<i4")
    body = msgspec.msgpack.encode({"input_ids": ids.tobytes(), "lengths": lengths.tobytes()})
    return Case(f"msgpack, {num_inputs} x {length} ids -> block", body, "application/msgpack", num_inputs)


IDS = list(range(1000, 1016))
TEXT = "sixteen tokens.."
CASES = (
    Case(
        "msgpack ids -> msgpack block",
        msgspec.msgpack.encode({"input_ids": np.array(IDS, "<i4").tobytes()}),
        "application/msgpack",
    ),
    Case("json ids -> base64", json.dumps({"input": IDS, "encoding_format": "base64"}).encode()),
    Case("json ids -> floats", json.dumps({"input": IDS}).encode()),
    Case("json text -> base64", json.dumps({"input": TEXT, "encoding_format": "base64"}).encode()),
    _bulk(16, 50),
    _bulk(64, 50),
)


class Client(asyncio.Protocol):
    """One connection that always has one request in flight."""

    def __init__(self, wire: bytes, latencies_ms: list[float]) -> None:
        self._wire = wire
        self._latencies_ms = latencies_ms
        self._left = -1
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for `send`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Note the time of a whole answer and send the next request."""
        if self._left < 0:
            self._head += data
            head, found, rest = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(self._head[:500].decode())
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._left, data = int(length), rest
        self._left -= len(data)
        if self._left == 0:
            self._latencies_ms.append((time.perf_counter() - self._sent_s) * 1e3)
            self.send()

    def send(self) -> None:
        """Send a request."""
        self._left, self._head = -1, b""
        self._sent_s = time.perf_counter()
        self._transport.write(self._wire)


async def drive(port: int, case: Case, flags: argparse.Namespace) -> dict[str, float]:
    """Keep requests of one kind in flight and count what comes back after the warm-up."""
    latencies_ms: list[float] = []
    loop = asyncio.get_running_loop()
    clients = [
        await loop.create_connection(lambda: Client(case.wire, latencies_ms), "127.0.0.1", port)
        for _ in range(flags.in_flight)
    ]
    await asyncio.sleep(ACCEPT_S)
    for _, client in clients:
        client.send()
    await asyncio.sleep(flags.warmup)
    before, cpu_s, started_s = len(latencies_ms), await server_state(port), time.perf_counter()
    await asyncio.sleep(flags.seconds)
    count, elapsed_s = len(latencies_ms) - before, time.perf_counter() - started_s
    state = await server_state(port)
    for transport, _ in clients:
        transport.abort()
    taken = sorted(latencies_ms[before:])
    server_us = (state["cpu_s"] - cpu_s["cpu_s"]) / count * 1e6
    return {
        "requests_per_s": round(count / elapsed_s, 1),
        "server_us": round(server_us, 1),
        "input_us": round(server_us / case.num_inputs, 1),
        "p50_ms": round(statistics.median(taken), 3),
        "p99_ms": round(taken[int(len(taken) * 0.99)], 3),
        "loop_lag_p99_ms": state["loop_lag_p99_ms"],
    }


async def server_state(port: int) -> dict[str, float]:
    """CPU seconds and loop lag of the server, read at /info, which also begins a new period for the lag."""

    def read() -> dict[str, float]:
        with urlopen(f"http://127.0.0.1:{port}/info", timeout=30) as answer:
            state: dict[str, float] = json.load(answer)["benchmark"]
            return state

    return await asyncio.to_thread(read)


async def serve(ready: Connection) -> None:
    """The server process: the real application and scheduler before the null engine."""
    engine = NullEngine()
    # In steps as large as a device would want them; this one would teach the scheduler that any will do.
    batcher = Batcher(engine, SchedulerOptions(min_budget_tokens=8192))
    await batcher.start()
    lags_ms: list[float] = []

    def describe() -> Mapping[str, object]:
        lag = sorted(lags_ms)[int(len(lags_ms) * 0.99)] if lags_ms else 0.0
        lags_ms.clear()
        return {"benchmark": {"cpu_s": time.process_time(), "loop_lag_p99_ms": round(lag, 3)}}

    app = create_app(GatewayOptions(), batcher, INFO, ByteTokenizer(), describe=describe)
    runner = await listen(app, "127.0.0.1", 0)
    quiet_collector()  # as the server: else the lag would be that of full collections, 20 ms each
    ready.send(runner.addresses[0][1])
    while not ready.poll():
        due_s = time.perf_counter() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lags_ms.append((time.perf_counter() - due_s) * 1e3)
    await batcher.close(1.0)
    await runner.cleanup()


def _server(ready: Connection) -> None:
    uvloop.run(serve(ready))


def main() -> None:
    """Measure every case and print a table; with --output also write JSON."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time of each case")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before that")
    parser.add_argument("--in-flight", type=int, default=64, help="requests in flight, one a connection")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_server, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    figures = {}
    for case in CASES:
        figures[case.name] = uvloop.run(drive(port, case, arguments))
        columns = (f"{name} {value:<9}" for name, value in figures[case.name].items())
        sys.stdout.write(f"{case.name:30}{' '.join(columns)}\n")
    ours.send("stop")
    server.join(10)
    machine = {
        "loop": LOOP,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if arguments.output:
        record = {"machine": machine, "in_flight": arguments.in_flight, "cases": figures}
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
