"""What tracing costs a request: CPU time of a short text's way through the gateway, without a socket.

python docs/benchmarks/trace_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from multidict import CIMultiDict
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.app import create_app
from gateway.exchange import PLAIN_ROUTES, Work
from gateway.options import GatewayOptions
from gateway.tracing import Tracing
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info
from tests.http.served import byte_tokenizer

REQUESTS, ROUNDS = 2000, 7
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


class Nowhere(SpanExporter):
    """Takes spans and forgets them: what sending costs depends on the collector."""

    def export(self, _: Sequence[ReadableSpan]) -> SpanExportResult:
        """Count as sent."""
        return SpanExportResult.SUCCESS


async def cpu_us(work: Work, headers: CIMultiDict[str]) -> float:
    """Microseconds of this process's CPU that a call of `work` takes."""

    async def body() -> bytes:
        return b'{"input":"hello world"}'

    started_s = time.process_time()
    for _ in range(REQUESTS):
        reply = await work(headers, body)
        assert reply.status == 200
    return (time.process_time() - started_s) / REQUESTS * 1e6


async def main() -> None:
    """Measure the ways in turns, and print."""
    engine = FakeEngine(info=fake_info())
    batcher = Batcher(engine, SchedulerOptions())
    await batcher.start()
    tracing = Tracing(BatchSpanProcessor(Nowhere()))

    def work(traced: Tracing | None) -> Work:
        app = create_app(GatewayOptions(), batcher, engine.info, byte_tokenizer(), tracing=traced)
        return app[PLAIN_ROUTES].works[b"/v1/embeddings"]

    cases = {"off": (work(None), "01"), "on": (work(tracing), "01"), "on, not sampled": (work(tracing), "00")}
    took: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, (one, flag) in cases.items():
            took[name].append(await cpu_us(one, CIMultiDict({"traceparent": PARENT + flag})))
    for name, values in took.items():
        print(f"{name:16} {statistics.median(values):6.1f} us of CPU a request, {min(values):.1f} at best")
    await batcher.close(0.0)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    uvloop.run(main())
