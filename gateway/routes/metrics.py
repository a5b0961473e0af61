"""GET /metrics: the counters of all three rooms, as Prometheus reads them; every family from the start."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.exchange import Answer
from gateway.exposition import CONTENT_TYPE, Counts, Page
from gateway.metrics import Durations, GatewayMetrics
from gateway.replicas.replica import Replica, State
from rose.batch import EngineInfo
from scheduler.metrics import Histogram, SchedulerMetrics

if TYPE_CHECKING:  # it asks replicas for other pages
    from gateway.replicas.fleet import Fleet

PATH = "/metrics"
# Graphs are counted by padded tokens up to each of these, so that thousands of shapes stay a few series.
_GRAPH_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, float("inf"))
_GRAPH_STATES = ("cold", "warmed", "captured", "uncapturable")
_GRAPH_RUNS = ("eager", "captures", "replayed", "evicted")


class Metrics:
    """The page. scheduler, engine: give the numbers of their rooms as of now; engine: see Engine.stats."""

    def __init__(
        self,
        gateway: GatewayMetrics,
        scheduler: Callable[[], SchedulerMetrics],
        engine: Callable[[], Mapping[str, Any]],
        info: EngineInfo,
        fleet: Fleet | None = None,
    ) -> None:
        self._gateway, self._scheduler, self._engine = gateway, scheduler, engine
        self._model = {"model": info.model, "dtype": info.dtype, "device": info.device}
        self._fleet = fleet
        self._started_s = time.time()

    def __call__(self) -> Answer:
        """Write the page; about a millisecond."""
        page = Page()
        _gateway(page, self._gateway)
        page.family("ivy_model_info", "gauge", "The model that is served; always 1.", [(self._model, 1)])
        page.gauge("ivy_start_time_seconds", "Unix time of the start.", self._started_s)
        _process(page)
        _scheduler(page, self._scheduler())
        _engine(page, self._engine())
        if self._fleet is not None:
            _replicas(page, self._fleet.replicas)
        return Answer(page.render(), CONTENT_TYPE)


def _gateway(page: Page, metrics: GatewayMetrics) -> None:
    routes = metrics.routes.items()
    page.family(
        "ivy_requests_total",
        "counter",
        "Answers by route and status.",
        [
            ({"route": path, "status": str(status)}, count)
            for path, route in routes
            for status, count in sorted(route.statuses.items())
        ],
    )
    page.family(
        "ivy_requests_cancelled_total",
        "counter",
        "Requests whose client left before the answer.",
        [({"route": path}, route.cancelled) for path, route in routes],
    )
    page.family(
        "ivy_errors_total",
        "counter",
        "Answers that are errors, by code.",
        [({"code": kind.code}, count) for kind, count in metrics.errors.items()],
    )
    page.gauge("ivy_requests_outstanding", "Requests being worked on.", metrics.outstanding)
    page.histogram(
        "ivy_request_duration_seconds",
        "From a request's head to its answer.",
        [({"route": path}, _seconds(route.seconds)) for path, route in routes],
    )
    page.histogram(
        "ivy_tokenization_duration_seconds",
        "Text to token ids, waiting for a thread included, of one request.",
        [({}, _seconds(metrics.tokenization))],
    )


def _process(page: Page) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime
    page.counter("ivy_process_cpu_seconds_total", "CPU time of the process, all threads.", seconds)
    page.gauge("ivy_process_peak_memory_bytes", "Most resident memory so far.", usage.ru_maxrss * 1024)


def _scheduler(page: Page, metrics: SchedulerMetrics) -> None:
    for name, meaning, value in (
        ("waiting_sequences", "Sequences that wait for a batch.", metrics.waiting_seqs),
        ("waiting_tokens", "Tokens that wait for a batch.", metrics.waiting_tokens),
        ("running_batches", "Batches launched and not finished.", metrics.running_batches),
        ("running_sequences", "Sequences in those batches.", metrics.running_seqs),
        ("budget_tokens", "Tokens a batch needs for nearly full throughput.", metrics.token_budget),
        ("rate_tokens_per_second", "Measured rate of the engine.", metrics.tokens_per_s),
    ):
        page.gauge(f"tulip_{name}", meaning, value)
    _jobs(page, metrics)
    for name, meaning, value in (
        ("batches_total", "Batches launched.", metrics.batches),
        ("batches_failed_total", "Batches that failed.", metrics.batches_failed),
        ("batches_halved_total", "Batches run in halves because memory was short.", metrics.batches_halved),
        ("sequences_total", "Sequences launched.", metrics.seqs),
        ("tokens_total", "Tokens launched, padding excluded.", metrics.tokens),
    ):
        page.counter(f"tulip_{name}", meaning, value)
    for name, meaning, histogram, scale in (
        ("step_duration_seconds", "Device time of a batch.", metrics.step_ms, 1e-3),
        ("queue_duration_seconds", "Wait of a completed job until its launch.", metrics.queue_ms, 1e-3),
        ("batch_tokens", "Tokens of a batch.", metrics.tokens_per_batch, 1),
        ("batch_sequences", "Sequences of a batch.", metrics.seqs_per_batch, 1),
    ):
        page.histogram(f"tulip_{name}", meaning, [({}, _counts(histogram, scale))])


def _jobs(page: Page, metrics: SchedulerMetrics) -> None:
    page.counter("tulip_jobs_accepted_total", "Jobs accepted.", metrics.accepted)
    page.family(
        "tulip_jobs_ended_total",
        "counter",
        "Accepted jobs by how they ended.",
        [
            ({"outcome": outcome}, getattr(metrics, outcome))
            for outcome in ("completed", "failed", "expired", "cancelled")
        ],
    )
    page.family(
        "tulip_jobs_refused_total",
        "counter",
        "Jobs not accepted: too much waited, or nothing new is taken.",
        [({"reason": "full"}, metrics.refused_full), ({"reason": "closed"}, metrics.refused_closed)],
    )


def _replicas(page: Page, replicas: Sequence[Replica]) -> None:
    """Of a gateway with replicas alone; `replica` is a place, so that a restart does not end the series."""
    named = [({"replica": replica.name}, replica) for replica in replicas]
    for name, kind, meaning, field in (
        ("outstanding_tokens", "gauge", "Tokens under way there.", "outstanding_tokens"),
        ("outstanding_chunks", "gauge", "Chunks under way there.", "outstanding_chunks"),
        ("rate_tokens_per_second", "gauge", "Its measured rate.", "tokens_per_s"),
        ("tokens_total", "counter", "Tokens that it ran.", "tokens"),
        ("chunks_total", "counter", "Chunks that it ran.", "chunks"),
        ("failures_total", "counter", "Chunks that failed there; most of them ran elsewhere.", "failures"),
        ("ejections_total", "counter", "Times that it was taken out of service.", "ejections"),
    ):
        samples = [(labels, getattr(replica, field)) for labels, replica in named]
        page.family(f"ivy_replica_{name}", kind, meaning, samples)
    page.family(
        "ivy_replica_state",
        "gauge",
        "1 for the state that it is in.",
        [
            ({**labels, "state": state.value}, int(replica.state is state))
            for labels, replica in named
            for state in State
        ],
    )


def _engine(page: Page, stats: Mapping[str, Any]) -> None:
    for name, meaning, key in (
        ("steps_total", "Steps launched.", "steps"),
        ("steps_failed_total", "Steps that failed.", "failed_steps"),
        ("sequences_total", "Sequences in those steps.", "sequences"),
        ("tokens_total", "Tokens in those steps.", "tokens"),
        ("non_finite_sequences_total", "Rows with a NaN or infinity, not served.", "non_finite_sequences"),
        ("padded_tokens_total", "Tokens of padding besides, of graphs and a CPU's steps.", "padded_tokens"),
    ):
        page.counter(f"rose_{name}", meaning, stats.get(key, 0))
    page.gauge("rose_running_steps", "Steps launched and not finished.", stats.get("in_flight", 0))
    graphs: Mapping[str, Any] = stats.get("graphs", {})
    page.gauge("rose_graph_memory_bytes", "Device memory of captured graphs.", graphs.get("bytes", 0))
    page.counter(
        "rose_graph_capture_seconds_total", "Time spent capturing.", graphs.get("capture_ms", 0) / 1e3
    )
    states, runs = _graph_counts(graphs.get("buckets", ()))
    page.family(
        "rose_graph_shapes", "gauge", "Shapes seen, by padded tokens up to a bound and by state.", states
    )
    page.family(
        "rose_graph_events_total",
        "counter",
        "Steps run eagerly or replayed, captures and evictions, by padded tokens up to a bound.",
        runs,
    )


_Samples = list[tuple[Mapping[str, str], float]]


def _graph_counts(shapes: list[Mapping[str, Any]]) -> tuple[_Samples, _Samples]:
    """Samples of states and of events, every pair of labels present."""
    states: Counter[tuple[str, str]] = Counter()
    runs: Counter[tuple[str, str]] = Counter()
    for shape in shapes:
        tokens = _tokens_label(shape["num_tokens"])
        states[tokens, shape["state"]] += 1
        for run in _GRAPH_RUNS:
            runs[tokens, run] += shape[run]
    labels = [_tokens_label(bound) for bound in _GRAPH_TOKENS]
    return (
        [({"tokens": one, "state": state}, states[one, state]) for one in labels for state in _GRAPH_STATES],
        [({"tokens": one, "event": run}, runs[one, run]) for one in labels for run in _GRAPH_RUNS],
    )


def _tokens_label(tokens: float) -> str:
    bound = next(bound for bound in _GRAPH_TOKENS if tokens <= bound)
    return "+Inf" if bound == float("inf") else str(bound)


def _seconds(durations: Durations) -> Counts:
    return Counts(durations.bounds, durations.counts, durations.total)


def _counts(histogram: Histogram, scale: float) -> Counts:
    return Counts(histogram.bounds, histogram.counts, histogram.total, scale)
