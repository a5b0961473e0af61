"""Traces for OpenTelemetry: a span a request, with its tokenisation, wait and inference inside.

Imported only where traces are wanted. What it traces it wraps, so that a server without traces has not even a
question to ask: see `gateway.app.create_app`. Spans leave in batches from a thread of the SDK's own, which
drops what it cannot send; nothing of that reaches a request.

Source: https://www.w3.org/TR/trace-context/, https://opentelemetry.io/docs/specs/semconv/http/http-spans/.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.balancer import Send
from gateway.exchange import Headers, Reply, Work
from gateway.pipeline import Scheduler
from gateway.replicas import wire
from gateway.replicas.chunks import Chunk
from gateway.replicas.replica import Replica
from gateway.tokenization.base import TextTokens
from gateway.tokenization.pool import TokenizerPool
from rose.batch import BatchResult, Int32, RaggedIds
from scheduler.errors import DeadlineExpired, Draining, QueueFull, SchedulerError
from scheduler.job import JobResult
from scheduler.metrics import SchedulerMetrics

# The semantic conventions' names, and ours for what they have none for.
_ROUTE = "http.route"
_METHOD = "http.request.method"
_STATUS = "http.response.status_code"
_ERROR = "error.type"
_SERVER = "server.address"
_MODEL = "gen_ai.request.model"
_TOKENS = "gen_ai.usage.input_tokens"
_TEXTS = "bouquet.texts"
_CHARACTERS = "bouquet.characters"
_SEQUENCES = "bouquet.sequences"
_BATCH_SEQUENCES = "bouquet.batch.sequences"  # of the batch that held the request's first
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans and sends them. processor: what becomes of a span that has ended."""

    def __init__(self, processor: SpanProcessor, version: str = "") -> None:
        ours = Resource.create({"service.name": "bouquet", "service.version": version})
        # Once more on top: what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins.
        named = ours.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("bouquet", version)

    @classmethod
    def exporting(cls, endpoint: str, version: str) -> Tracing:
        """To an OTLP collector by HTTP. endpoint: its address; "": what the OTEL_* variables say."""
        url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)), version)

    def close(self) -> None:
        """Send what is left; blocks for as long as the exporter tries."""
        self._provider.shutdown()

    def work(self, route: str, model: str, work: Work) -> Work:
        """`work`, each call in a span that continues the client's trace, if it sent one."""
        name = f"POST {route}"
        attributes = {_ROUTE: route, _METHOD: "POST", _MODEL: model}

        async def traced(headers: Headers, body: Callable[[], Awaitable[bytes]]) -> Reply:
            parent = _PROPAGATOR.extract(headers)
            span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
            inside = context.attach(trace.set_span_in_context(span, parent))
            try:
                reply = await work(headers, body)
                _answered(span, reply)
                return reply
            except BaseException as error:  # the client left
                span.set_attribute(_ERROR, type(error).__name__)
                raise
            finally:
                span.end()
                context.detach(inside)

        return traced

    def scheduler(self, scheduler: Scheduler) -> Scheduler:
        """`scheduler`, with spans of the wait and of the inference."""
        return _TracedScheduler(scheduler, self._tracer)

    def sending(self, send: Send) -> Send:
        """`send`, each chunk in a span of the request's trace, which the replica's own spans go on with."""

        async def traced(replica: Replica, chunk: Chunk, left_s: float | None) -> BatchResult:
            if not trace.get_current_span().is_recording():
                return await send(replica, chunk, left_s)
            attributes: dict[str, str | int] = {
                _METHOD: "POST",
                _SERVER: replica.name,
                _SEQUENCES: chunk.num_seqs,
                _TOKENS: chunk.num_tokens,
            }
            begin, name = self._tracer.start_as_current_span, f"POST {wire.PATH}"
            with begin(name, kind=SpanKind.CLIENT, attributes=attributes) as span:
                try:
                    return await send(replica, chunk, left_s)
                except BaseException as error:  # cancelled ones end as well
                    span.set_attribute(_ERROR, type(error).__name__)
                    raise

        return traced

    @staticmethod
    def carried() -> dict[str, str]:
        """Headers by which a server that is asked now goes on with the trace."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        return carrier

    def pool(self, *settings: Any) -> TokenizerPool:
        """A TokenizerPool with a span a call."""
        return _TracedPool(self._tracer, *settings)


def _answered(span: Span, reply: Reply) -> None:
    reply.headers.extend(Tracing.carried().items())
    span.set_attribute(_STATUS, int(reply.status))
    if reply.status >= HTTPStatus.BAD_REQUEST:
        span.set_attribute(_ERROR, str(int(reply.status)))
    if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(StatusCode.ERROR)


class _TracedScheduler:
    """Its spans have the scheduler's own times, not those at which a caller came to look."""

    def __init__(self, scheduler: Scheduler, tracer: trace.Tracer) -> None:
        self._scheduler = scheduler
        self._tracer = tracer

    @property
    def healthy(self) -> bool:
        return self._scheduler.healthy

    @property
    def metrics(self) -> SchedulerMetrics:
        return self._scheduler.metrics

    async def run(self, sequences: Sequence[Int32], *settings: Any, **more: Any) -> JobResult:
        ids = RaggedIds.of(sequences)
        request = trace.get_current_span()
        if not request.is_recording():
            return await self._scheduler.run(ids, *settings, **more)
        request.set_attributes({_SEQUENCES: len(ids), _TOKENS: len(ids.flat)})
        accepted_ns = time.time_ns()
        try:
            result = await self._scheduler.run(ids, *settings, **more)
        except (DeadlineExpired, QueueFull, Draining) as error:
            self._span("queue", accepted_ns, time.time_ns(), error)
            raise
        launched_ns = accepted_ns + int(result.queue_ms * 1e6)
        request.set_attribute(_BATCH_SEQUENCES, result.batch_seqs)
        self._span("queue", accepted_ns, launched_ns)
        self._span("inference", launched_ns, launched_ns + int(result.inference_ms * 1e6))
        return result

    def _span(self, name: str, start_ns: int, end_ns: int, error: SchedulerError | None = None) -> None:
        span = self._tracer.start_span(name, start_time=start_ns)
        if error is not None:
            span.set_attribute(_ERROR, type(error).__name__)
            span.set_status(StatusCode.ERROR, str(error))
        span.end(end_ns)


class _TracedPool(TokenizerPool):
    def __init__(self, tracer: trace.Tracer, *settings: Any) -> None:
        super().__init__(*settings)
        self._tracer = tracer

    async def encode(
        self, texts: Sequence[str], max_tokens: int | None = None, *, ends: bool = False
    ) -> RaggedIds:
        with self._span(texts):
            return await super().encode(texts, max_tokens, ends=ends)

    async def tokens(
        self,
        texts: Sequence[str],
        *,
        special_tokens: bool,
        check_count: Callable[[int], None],
        write: Callable[[Iterable[TextTokens]], Iterator[bytes]],
    ) -> bytes:
        with self._span(texts):
            return await super().tokens(
                texts, special_tokens=special_tokens, check_count=check_count, write=write
            )

    @contextmanager
    def _span(self, texts: Sequence[str]) -> Iterator[None]:
        if not trace.get_current_span().is_recording():
            yield
            return
        attributes = {_TEXTS: len(texts), _CHARACTERS: sum(map(len, texts))}
        span = self._tracer.start_span("tokenize", attributes=attributes)
        try:
            yield
        finally:
            span.end()
