"""server.py over the real engine on a simulated device; with --together, two such engines in one process."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timed_device import INFO, engine_of

from gateway.app import create_app
from gateway.balancer import Balancer
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.replicas.chunks import Chunk
from gateway.replicas.pace import ChunkTimes
from gateway.replicas.replica import Replica
from rose.batch import BatchResult
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions

# A step of as many tokens as pay takes so long on an H200.
STEP_S = 0.03


def as_server() -> int:
    """The server itself, its engine replaced."""
    module = types.ModuleType("rose.engine")
    module.__dict__["load_engine"] = lambda *_, **__: engine_of(STEP_S)
    sys.modules["rose.engine"] = module
    import server

    server.known = lambda folder: {"model": INFO.model}
    return server.main()


async def together() -> None:
    """Two engines in this process, behind the same balancer as processes are."""
    batchers: dict[Replica, Batcher] = {}

    async def send(replica: Replica, chunk: Chunk, left_s: float | None) -> BatchResult:
        result = await batchers[replica].run(chunk.run.sequences, deadline_s=left_s)
        return BatchResult(result.vectors, result.int8)

    balancer = Balancer(INFO, SchedulerOptions(), send)
    times = ChunkTimes()
    for name in ("0", "1"):
        replica = Replica(name, times, lambda _: balancer.changed())
        batchers[replica] = Batcher(engine_of(STEP_S), SchedulerOptions())
        await batchers[replica].start()
        balancer.replicas.append(replica)
        replica.admit(0.0)
    runner = await listen(create_app(GatewayOptions(), balancer, INFO, None), "127.0.0.1", 0)
    print(f"ready after 0 s at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if "--together" in sys.argv:
        uvloop.run(together())
    else:
        sys.exit(as_server())
