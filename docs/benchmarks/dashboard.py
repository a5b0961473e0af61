"""What one open page costs the server: processor time a second, nobody asking for anything else.

    python docs/benchmarks/dashboard.py [--seconds 20] [--streams 1 16]

The server is a process of its own over a scripted engine that knows as many shapes with graphs as a server
keeps at most (512); half of them change all the time. Its processor time is read from /proc, without streams
and with so many of them, each read by a client in this process, as the page does it.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHAPES = 512


def serve() -> None:
    """The server, on a port that it prints."""
    import uvloop

    from gateway.app import create_app
    from gateway.listener import listen
    from gateway.options import GatewayOptions
    from gateway.process import quiet_collector
    from rose.graph_runner import GraphKey, GraphLimits, GraphRunner
    from scheduler.batcher import Batcher
    from scheduler.options import SchedulerOptions
    from tests.browser.graph_server import NoDevice
    from tests.fakes import FakeEngine

    class Graphed(FakeEngine):
        """Each time it is asked, half of its shapes have been replayed once more."""

        def __init__(self) -> None:
            super().__init__()
            self.runner = GraphRunner[None](NoDevice(), GraphLimits("lazy", 1 << 20, SHAPES, 1 << 40))
            keys = [GraphKey(64 * (1 + shape // 8), 1 << shape % 8, "fake") for shape in range(SHAPES)]
            self.entries = [self.runner.entry(key) for key in keys]
            for entry in self.entries * 2:
                self.runner.run(entry, None)

        def stats(self) -> Mapping[str, object]:
            for entry in self.entries[::2]:
                self.runner.run(entry, None)
            return {"graphs": self.runner.stats()}

    async def run() -> None:
        engine = Graphed()
        batcher = Batcher(engine, SchedulerOptions())
        await batcher.start()
        app = create_app(GatewayOptions(), batcher, engine.info, None, engine_stats=engine.stats)
        runner = await listen(app, "127.0.0.1", 0)
        quiet_collector()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    uvloop.run(run())


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in seconds, to the microsecond where the kernel has it."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def read(url: str) -> None:
    """Read a stream until cancelled."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        async for _ in answer.content.iter_any():
            pass


async def cost(pid: int, port: str, streams: int, seconds: float) -> float:
    """Milliseconds of processor time a second with so many streams."""
    url = f"http://127.0.0.1:{port}/dashboard/events"
    readers = [asyncio.ensure_future(read(url)) for _ in range(streams)]
    await asyncio.sleep(2)
    before = cpu_s(pid)
    await asyncio.sleep(seconds)
    spent_ms = (cpu_s(pid) - before) * 1e3 / seconds
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await asyncio.sleep(1)
    return spent_ms


async def measure(pid: int, port: str, seconds: float, streams: list[int]) -> None:
    for count in (0, *streams):
        spent_ms = await cost(pid, port, count, seconds)
        print(f"{count:3} streams: {spent_ms:6.2f} ms of processor time a second")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = server.stdout.readline().strip()
            asyncio.run(measure(server.pid, port, given.seconds, given.streams))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
