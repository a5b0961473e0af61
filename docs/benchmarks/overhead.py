"""What a request costs besides the device's own time: HTTP, gateway, scheduler, step, wake-up.

    python docs/benchmarks/overhead.py [--rounds 2000] [--device-ms 1.0] [--output FILE.json]

The server is one process: the real application, scheduler and `GraphEngine`, on a simulated device that takes
`--device-ms` a step and nothing from the host. The client is another process with one blocking socket, one
request at a time. Over the wire: token ids and vectors of 1024 dimensions, both as msgpack blocks.

Over HTTP, in µs: "p50" and "p99" as the client sees it, the device's time included; then how the median
splits: "outside" (aiohttp, kernel, client), "gateway" (decode, check, normalise, encode), "queue", "step"
(launch, device, wake-up, result); "cpu" is the server's processor time a request.

"On the loop" is the same without a socket or a second process: from the bytes that arrive at aiohttp's
protocol to those it writes. With a device that takes no time that is the loop's own time a request, and the
steadiest figure on a busy machine, above all its minimum.

"GraphEngine.step" is that call alone, its graph captured: one after another, and "cold", with 64 MiB touched
and other Python run before each, so that its code and objects come from memory again.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import platform
import pstats
import statistics
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop
from as_served import LOOP
from plain_client import connect, exchange, request_of, stages_us
from timed_device import INFO, VOCAB, engine_of

from gateway.app import create_app
from gateway.exchange import PLAIN_ROUTES
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.process import quiet_collector
from gateway.rehearsal import RequestRehearsal
from rose.batch import Float32, RaggedBatch
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions

STEP_SHAPES = ((1, 128), (1, 512), (8, 512), (32, 512))
FORGET_BYTES = 64 << 20
WARM_ROUNDS = 50
# One that plain requests do not have: aiohttp then reads and writes all of the connection.
NOT_PLAIN = "Cookie: a=b\r\n"
# Name, sequences, tokens of each, header lines.
CASES = (
    ("1x128", 1, 128, ""),
    ("1x128 aiohttp", 1, 128, NOT_PLAIN),
    ("5x512", 5, 512, ""),
    ("25x512", 25, 512, ""),
    ("100x512", 100, 512, ""),
)


def serve(ready: Connection, step_s: float) -> None:
    """The server, until told to stop; tells its processor time when asked."""
    uvloop.run(_serve(ready, step_s))


async def _serve(ready: Connection, step_s: float) -> None:
    engine = engine_of(step_s)
    batcher = Batcher(engine, SchedulerOptions())
    await batcher.start()
    app = create_app(GatewayOptions(), batcher, INFO, None)
    rehearsal = await RequestRehearsal.start(GatewayOptions(), INFO, app[PLAIN_ROUTES])
    engine.on_near = rehearsal.run
    runner = await listen(app, "127.0.0.1", 0)
    quiet_collector()
    stop = asyncio.Event()
    ready.send(runner.addresses[0][1])

    def asked() -> None:
        if ready.recv():
            ready.send(time.process_time())
        else:
            stop.set()

    asyncio.get_running_loop().add_reader(ready.fileno(), asked)
    await stop.wait()
    await batcher.close(1.0)
    await rehearsal.close()
    await runner.cleanup()


def measure(port: int, wire: bytes, rounds: int, server: Connection) -> dict[str, float]:
    """Medians over `rounds` requests, in µs, the device's time included."""
    rows = []
    with connect(("127.0.0.1", port)) as connection:
        for _ in range(WARM_ROUNDS):
            exchange(connection, wire)
        server.send(True)
        cpu_s = server.recv()
        for _ in range(rounds):
            started = time.perf_counter()
            head = exchange(connection, wire)
            took_us = (time.perf_counter() - started) * 1e6
            rows.append((took_us, *stages_us(head)))
        server.send(True)
        cpu_us = (server.recv() - cpu_s) / rounds * 1e6
    took, _, queue, inference = (sorted(column) for column in zip(*rows, strict=True))
    median = statistics.median
    return {
        "p50": median(took),
        "p99": took[int(0.99 * rounds)],
        "outside": median([row[0] - row[1] for row in rows]),
        "gateway": median([row[1] - row[2] - row[3] for row in rows]),
        "queue": median(queue),
        "step": median(inference),
        "cpu": cpu_us,
    }


def over_http(step_s: float, rounds: int) -> dict[str, dict[str, float]]:
    """`measure` for each case against one server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, step_s), daemon=True)
    server.start()
    port = ours.recv()
    figures = {}
    for name, count, length, more in CASES:
        fewer = max(50, rounds // max(1, count // 4))
        figures[name] = measure(port, request_of(INFO.model, VOCAB, count, length, more), fewer, ours)
    ours.send(False)
    server.join(20)
    return figures


class Wire(asyncio.Transport):
    """A transport that goes nowhere, and notes when an answer was written."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: asyncio.Future[float] | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """One whole answer."""
        now_s = time.perf_counter()
        if self.answered is None or not bytes(data[:12]) == b"HTTP/1.1 200":
            raise RuntimeError(f"unexpected: {bytes(data[:200])!r}")
        self.answered.set_result(now_s)

    def is_closing(self) -> bool:
        """Never."""
        return False

    def pause_reading(self) -> None:
        """There is nothing to pause."""

    def resume_reading(self) -> None:
        """There is nothing to resume."""

    def close(self) -> None:
        """Nothing is open."""


async def loop_us(
    request: bytes, step_s: float, rounds: int, profile: cProfile.Profile | None
) -> dict[str, float]:
    """From a request's bytes to its answer's, in µs; see above."""
    batcher = Batcher(engine_of(step_s), SchedulerOptions())
    await batcher.start()
    runner = await listen(create_app(GatewayOptions(), batcher, INFO, None), "127.0.0.1", 0)
    if runner.server is None:
        raise RuntimeError("the application is not set up")
    protocol, wire, times = runner.server(), Wire(), []
    protocol.connection_made(wire)
    # As uvloop reads: 256 KiB at a time, each in a turn of its own.
    reads = [request[start : start + (1 << 18)] for start in range(0, len(request), 1 << 18)]
    for number in range(WARM_ROUNDS + rounds):
        if number == WARM_ROUNDS and profile is not None:
            profile.enable()
        wire.answered = asyncio.get_running_loop().create_future()
        started_s = time.perf_counter()
        for read in reads:
            protocol.data_received(read)
            await asyncio.sleep(0)
        times.append((await wire.answered - started_s) * 1e6)
    if profile is not None:
        profile.disable()
    protocol.connection_lost(None)
    await batcher.close(1.0)
    await runner.cleanup()
    times = sorted(times[WARM_ROUNDS:])
    return {"min": times[0], "p50": statistics.median(times), "p99": times[int(0.99 * rounds)]}


def forget(memory: Float32) -> None:
    """Leave little of what ran before in the processor's caches: as when other work came between steps."""
    memory += 1
    json.loads(json.dumps([{"index": str(index), "squares": [index * index]} for index in range(500)]))


async def step_us(count: int, length: int, rounds: int, *, cold: bool) -> dict[str, float]:
    """What `GraphEngine.step` takes of the loop's thread when the shape's graph is there, alone, in µs."""
    engine = engine_of(0.0)
    rng = np.random.default_rng(0)
    batch = RaggedBatch.pack([rng.integers(0, VOCAB, length, np.int32) for _ in range(count)])
    memory = np.zeros(FORGET_BYTES // 4, np.float32)
    times = []
    for number in range(WARM_ROUNDS + rounds):
        if cold:
            forget(memory)
        started = time.perf_counter()
        lazy = engine.step(batch)
        if number >= WARM_ROUNDS:
            times.append((time.perf_counter() - started) * 1e6)
        await lazy
    times.sort()
    return {"min": times[0], "p50": statistics.median(times), "p99": times[int(0.99 * rounds)]}


def show(title: str, figures: Mapping[str, Mapping[str, float]]) -> None:
    """One table, a line a shape."""
    names = list(next(iter(figures.values())))
    print(f"\n{title}\n{'':>14}" + "".join(f"{name:>10}" for name in names))
    for shape, row in figures.items():
        print(f"{shape:>14}" + "".join(f"{row[name]:10.1f}" for name in names))


def on_the_loop(step_s: float, rounds: int, *, profiled: bool) -> dict[str, dict[str, float]]:
    """`loop_us` for each case."""
    figures = {}
    for name, count, length, more in CASES:
        profile = cProfile.Profile() if profiled else None
        fewer = max(50, rounds // max(1, count // 4))
        figures[name] = uvloop.run(
            loop_us(request_of(INFO.model, VOCAB, count, length, more), step_s, fewer, profile)
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return figures


def main() -> None:
    """Measure, print, write."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--rounds", type=int, default=2000, help="requests of the smallest shape")
    parser.add_argument("--device-ms", type=float, default=1.0, help="what the simulated device takes a step")
    parser.add_argument("--no-http", action="store_true", help="only what happens on the loop")
    parser.add_argument(
        "--profile", action="store_true", help="print where the loop's time goes (it then rises)"
    )
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    report = {}
    for device_ms in (0.0, arguments.device_ms):
        title = f"on the loop, {device_ms:g} ms a step on the device"
        report[title] = on_the_loop(device_ms / 1e3, arguments.rounds, profiled=arguments.profile)
        show(title, report[title])
    for name, cold in (("step", False), ("step, cold", True)):
        fewer = arguments.rounds // 4 if cold else arguments.rounds
        report[name] = {
            f"{count}x{length}": uvloop.run(step_us(count, length, fewer, cold=cold))
            for count, length in STEP_SHAPES
        }
        show(f"GraphEngine.{name}", report[name])
    for device_ms in () if arguments.no_http else (0.0, arguments.device_ms):
        title = f"over HTTP, {device_ms:g} ms a step on the device"
        report[title] = over_http(device_ms / 1e3, arguments.rounds)
        show(title, report[title])
    if arguments.output:
        machine = {
            "loop": LOOP,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg()[0],
        }
        arguments.output.write_text(json.dumps({"machine": machine, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
