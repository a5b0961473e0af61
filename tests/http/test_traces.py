"""Traces of the real application on loopback, read from the SDK's exporter in memory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.app import create_app
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.tracing import Tracing
from rose.errors import OutOfMemoryError, StepError
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine
from tests.http.fleets import fleet, settled
from tests.http.served import Served, serving, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """A server and the spans that its requests left."""

    def __init__(self, server: Served, exporter: InMemorySpanExporter) -> None:
        self.server, self._exporter = server, exporter

    def spans(self) -> dict[str, ReadableSpan]:
        """By name; of one request."""
        spans = self._exporter.get_finished_spans()
        named = {span.name: span for span in spans}
        assert len(named) == len(spans)
        return named


@asynccontextmanager
async def traced(
    engine: FakeEngine | None = None,
    tokenizer: HuggingFaceTokenizer | None = None,
    options: GatewayOptions | None = None,
    scheduling: SchedulerOptions | None = None,
) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    async with (
        asyncio.timeout(30),
        serving(
            options, engine=engine, tokenizer=tokenizer, scheduling=scheduling, tracing=tracing
        ) as server,
    ):
        yield Traced(server, exporter)


async def test_a_request_is_a_span_with_its_phases_inside(tokenizer: HuggingFaceTokenizer) -> None:
    engine = FakeEngine(service_s=0.02)
    async with traced(engine, tokenizer) as one:
        before_ns = time.time_ns()
        reply = await one.server.embed({"input": ["abc", "de"]})
        after_ns = time.time_ns()
        spans = one.spans()
    assert set(spans) == {"POST /v1/embeddings", "tokenize", "queue", "inference"}
    root = spans["POST /v1/embeddings"]
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert dict(root.attributes or {}) == {
        "http.route": "/v1/embeddings",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "gen_ai.request.model": "fake",
        "gen_ai.usage.input_tokens": 9,
        "bouquet.sequences": 2,
        "bouquet.batch.sequences": 2,
    }
    assert root.status.status_code is StatusCode.UNSET
    phases = [spans[name] for name in ("tokenize", "queue", "inference")]
    for span in phases:
        assert span.parent is not None
        assert root.context is not None
        assert span.parent.span_id == root.context.span_id
    edges = [
        before_ns,
        root.start_time,
        *(edge for span in phases for edge in (span.start_time, span.end_time)),
    ]
    edges += [root.end_time, after_ns]
    assert all(edge is not None for edge in edges)
    assert edges == sorted(edge or 0 for edge in edges)
    # The same figures as the answer's headers.
    for name, header in (("queue", "x-queue-time"), ("inference", "x-inference-time")):
        took_ms = ((spans[name].end_time or 0) - (spans[name].start_time or 0)) / 1e6
        assert took_ms == pytest.approx(float(reply.headers[header]), abs=0.01)
    assert float(reply.headers["x-inference-time"]) >= 19


async def test_a_client_s_trace_goes_on_and_is_told(tokenizer: HuggingFaceTokenizer) -> None:
    async with traced(tokenizer=tokenizer) as one:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
        reply = await one.server.embed({"input": "abc"}, headers=headers)
        root = one.spans()["POST /v1/embeddings"]
    assert root.context is not None
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert reply.headers["tracestate"] == "vendor=x"


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
async def test_a_traceparent_that_is_none_begins_a_new_trace(parent: str) -> None:
    async with traced() as one:
        assert (await one.server.embed({"input": [1]}, headers={"traceparent": parent})).status == 200
        assert one.spans()["POST /v1/embeddings"].parent is None


async def test_a_client_that_does_not_sample_is_not_sampled() -> None:
    async with traced() as one:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        reply = await one.server.embed({"input": [1]}, headers=headers)
        assert reply.headers["traceparent"].startswith(f"00-{TRACE}-")
        assert reply.headers["traceparent"].endswith("-00")
        assert one.spans() == {}


async def test_what_is_wrong_with_a_request_is_its_client_s_fault() -> None:
    async with traced() as one:
        assert (await one.server.embed({"input": []})).status == 400
        root = one.spans()["POST /v1/embeddings"]
    assert root.attributes is not None
    assert (root.attributes["http.response.status_code"], root.attributes["error.type"]) == (400, "400")
    assert root.status.status_code is StatusCode.UNSET


async def test_what_fails_here_is_an_error_of_the_span() -> None:
    async with traced() as one:
        one.server.engine.fail_next(StepError("kernel broke"))
        assert (await one.server.embed({"input": [1]})).status == 500
        spans = one.spans()
    root = spans["POST /v1/embeddings"]
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 500
    assert root.status.status_code is StatusCode.ERROR


async def test_a_wait_that_was_too_long_is_seen_as_one() -> None:
    engine = FakeEngine(service_s=None)
    options = GatewayOptions(request_timeout_s=0.05)
    async with traced(engine, options=options, scheduling=SchedulerOptions(max_in_flight=1)) as one:
        running = asyncio.ensure_future(one.server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        assert (await one.server.embed({"input": [2]})).status == 504
        spans = one.spans()
        engine.finish()
        await running
    queue = spans["queue"]
    assert queue.status.status_code is StatusCode.ERROR
    assert (queue.end_time or 0) - (queue.start_time or 0) >= 40e6
    assert spans["POST /v1/embeddings"].status.status_code is StatusCode.ERROR


async def test_requests_at_once_do_not_mix_their_spans() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    async with asyncio.timeout(30), serving(engine=FakeEngine(service_s=0.01), tracing=tracing) as server:
        await asyncio.gather(*(server.embed({"input": [[1]] * n}) for n in range(1, 9)))
    spans = exporter.get_finished_spans()
    roots = {span.context.span_id: span for span in spans if span.kind is SpanKind.SERVER and span.context}
    assert sorted((root.attributes or {})["bouquet.sequences"] for root in roots.values()) == [*range(1, 9)]
    for name in ("queue", "inference"):
        parents = [span.parent.span_id for span in spans if span.name == name and span.parent]
        assert sorted(parents) == sorted(roots)


class Broken(SpanExporter):
    """A collector that is not there, as slowly as one can be; the first export hangs until released."""

    def __init__(self) -> None:
        self.tried, self.released = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.tried.set()
        self.released.wait(20)
        raise ConnectionError("no collector")

    def shutdown(self) -> None:
        self.released.set()


async def test_an_exporter_that_hangs_and_fails_touches_no_request() -> None:
    exporter = Broken()
    processor = BatchSpanProcessor(
        exporter, schedule_delay_millis=1, max_queue_size=4, max_export_batch_size=2
    )
    tracing = Tracing(processor)
    try:
        async with asyncio.timeout(30), serving(tracing=tracing) as server:
            for _ in range(20):  # more than the queue takes
                assert (await server.embed({"input": [1]})).status == 200
            assert await asyncio.to_thread(exporter.tried.wait, 10)
            exporter.released.set()
            assert (await server.embed({"input": [1]})).status == 200
    finally:
        exporter.released.set()
        await asyncio.to_thread(tracing.close)


async def test_spans_reach_a_collector_by_http_and_the_last_ones_at_the_end() -> None:
    posted: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = Tracing.exporting(f"http://127.0.0.1:{collector.server_port}/", "0.0")
        async with asyncio.timeout(30), serving(tracing=tracing) as server:
            assert (await server.embed({"input": [1]})).status == 200
        assert not posted  # the next batch is seconds away
        await asyncio.wait_for(asyncio.to_thread(tracing.close), 10)
        collector.shutdown()
    assert [path for path, _ in posted] == ["/v1/traces"]
    for word in (b"bouquet", b"POST /v1/embeddings", b"inference"):
        assert word in posted[0][1]


def test_without_traces_nothing_of_opentelemetry_is_imported(repo_root: Path) -> None:
    script = """
import asyncio, sys
from tests.http.served import serving
async def main():
    async with serving() as server:
        await server.assert_works()
        assert "traceparent" not in (await server.embed({"input": [1]})).headers
asyncio.run(main())
import server
from gateway.serving import start_tracing
assert start_tracing(server.parse_options([]).traces, "0") is None
print(sorted(name for name in sys.modules if name.startswith(("opentelemetry", "gateway.tracing"))))
"""
    environment = {"PATH": "", "PYTHONPATH": str(repo_root)}
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=repo_root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.strip().splitlines()[-1] == "[]"


async def test_a_client_that_leaves_is_told_in_its_span() -> None:
    engine = FakeEngine(service_s=None)
    async with traced(engine) as one:
        leaving = asyncio.ensure_future(one.server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        leaving.cancel()
        await until(lambda: "POST /v1/embeddings" in one.spans())
        root = one.spans()["POST /v1/embeddings"]
        engine.finish()
    assert root.attributes is not None
    assert root.attributes["error.type"] == "CancelledError"
    assert "http.response.status_code" not in root.attributes


@pytest.mark.parametrize("path", ["/embed", "/rerank", "/tokenize"])
async def test_every_work_route_is_traced_by_its_name(tokenizer: HuggingFaceTokenizer, path: str) -> None:
    bodies = {
        "/embed": {"inputs": "a"},
        "/rerank": {"query": "a", "texts": ["b"]},
        "/tokenize": {"inputs": "a"},
    }
    async with traced(tokenizer=tokenizer) as one:
        assert (await one.server.embed(bodies[path], path=path)).status == 200
        assert (await one.server.send("GET", "/health")).status == 200
        inside = {"tokenize"} if path == "/tokenize" else {"tokenize", "queue", "inference"}
        assert set(one.spans()) == {f"POST {path}"} | inside


@asynccontextmanager
async def in_front(*replicas: Served, exporter: InMemorySpanExporter) -> AsyncIterator[Served]:
    """A gateway over these servers, all of them in service, with traces of its own."""
    tracing = Tracing(SimpleSpanProcessor(exporter))
    async with fleet(*replicas, tracing=tracing) as found:
        await settled(found, *["ready"] * len(replicas))
        app = create_app(GatewayOptions(), found.balancer, found.fleet.info, None, tracing=tracing)
        runner = await listen(app, "127.0.0.1", 0)
        gateway = Served(runner, replicas[0].engine, replicas[0].batcher)
        try:
            yield gateway
        finally:
            await gateway.session.close()
            await runner.cleanup()


def by_id(*exporters: InMemorySpanExporter) -> dict[int, ReadableSpan]:
    spans = [span for exporter in exporters for span in exporter.get_finished_spans()]
    return {span.context.span_id: span for span in spans if span.context is not None}


async def test_a_trace_goes_on_in_replicas() -> None:
    here, one, two = (InMemorySpanExporter() for _ in range(3))
    theirs = [Tracing(SimpleSpanProcessor(exporter)) for exporter in (one, two)]
    async with (
        asyncio.timeout(30),
        serving(tracing=theirs[0]) as first,
        serving(tracing=theirs[1]) as second,
        in_front(first, second, exporter=here) as gateway,
    ):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"input": [[index] * 30 for index in range(80)]}
        plain = asyncio.ensure_future(gateway.embed({"input": [7]}))  # whose chunk is another trace's
        assert (await gateway.embed(body, headers=headers)).status == 200
        assert (await plain).status == 200
    spans = by_id(here, one, two)
    ours = [span for span in spans.values() if span.context and span.context.trace_id == int(TRACE, 16)]
    (root,) = (span for span in ours if span.name == "POST /v1/embeddings")
    chunks = [span for span in ours if span.kind is SpanKind.CLIENT]
    assert {span.parent.span_id for span in chunks if span.parent} == {root.context.span_id}  # type: ignore[union-attr]
    assert {(span.attributes or {})["server.address"] for span in chunks} == {first.url, second.url}
    assert sum((span.attributes or {})["bouquet.sequences"] for span in chunks) == 80  # type: ignore[misc]
    served = [span for span in ours if span.name == "POST /v1/sequences" and span.kind is SpanKind.SERVER]
    assert len(served) == len(chunks) > 1
    assert {span.parent.span_id for span in served if span.parent} == {
        span.context.span_id for span in chunks if span.context
    }
    other = [span for span in spans.values() if span not in ours]
    assert {span.name for span in other} == {
        "POST /v1/embeddings",
        "POST /v1/sequences",
        "queue",
        "inference",
    }
    assert len({span.context.trace_id for span in other if span.context}) == 1


async def test_a_trace_that_is_not_sampled_is_not_in_replicas_either() -> None:
    here, there = InMemorySpanExporter(), InMemorySpanExporter()
    async with (
        asyncio.timeout(30),
        serving(tracing=Tracing(SimpleSpanProcessor(there))) as server,
        in_front(server, exporter=here) as gateway,
    ):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert (await gateway.embed({"input": [1]}, headers=headers)).status == 200
    assert by_id(here, there) == {}


async def test_a_chunk_that_runs_again_is_in_the_trace_twice() -> None:
    here, there = InMemorySpanExporter(), InMemorySpanExporter()
    async with (
        asyncio.timeout(30),
        serving(tracing=Tracing(SimpleSpanProcessor(there))) as server,
        in_front(server, exporter=here) as gateway,
    ):
        server.engine.fail_next(OutOfMemoryError("full"))
        assert (await gateway.embed({"input": [1]})).status == 200
    chunks = [span for span in here.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert [(span.attributes or {}).get("error.type") for span in chunks] == ["Unavailable", None]
    assert chunks[0].status.status_code is StatusCode.ERROR
    assert len({span.context.trace_id for span in by_id(here, there).values() if span.context}) == 1
