"""The numbers of the page: counters as they stand, from which the page works out rates and quantiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.metrics import SECONDS_BOUNDS, GatewayMetrics
from gateway.pipeline import max_tokens
from gateway.web.coverage import Coverage
from rose.batch import EngineInfo
from scheduler.metrics import SchedulerMetrics

if TYPE_CHECKING:  # it asks replicas for other pages
    from gateway.replicas.fleet import Fleet


class Snapshot:
    """What the feed tells: see `gateway.web.feed.Source`.

    scheduler, engine: give the numbers of their rooms as of now; engine: see Engine.stats. work: the routes
    whose answers count as requests. text: whether the server takes text. names: of the model, as served.
    """

    def __init__(
        self,
        gateway: GatewayMetrics,
        scheduler: Callable[[], SchedulerMetrics],
        engine: Callable[[], Mapping[str, Any]],
        info: EngineInfo,
        *,
        work: Collection[str],
        names: tuple[str, ...],
        text: bool,
        fleet: Fleet | None = None,
    ) -> None:
        self._gateway, self._scheduler, self._engine, self._fleet = gateway, scheduler, engine, fleet
        self._work = work
        self._coverage = Coverage()
        self._look_at_graphs = False  # of 512 shapes it takes nearly all of an update's time
        self._started_s = time.monotonic()
        # On the page of a server that nobody has asked yet the steps of its warm-up would look like work.
        self._warm_up = _counters(scheduler()), _histograms(scheduler())
        self._model = {
            "since": time.time(),
            "model": names[0],
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
            "dimensions": info.dimensions,
            "max_tokens": max_tokens(info),
            "task": info.task,
            "labels": len(info.labels),
            "text": text,
            "replicated": fleet is not None,
        }

    def whole(self) -> bytes:
        """Model and bounds of the histograms, and all numbers."""
        metrics = self._scheduler()
        told = {
            **self._model,
            "ms_bounds": metrics.step_ms.bounds,
            "gateway_ms_bounds": [bound * 1e3 for bound in SECONDS_BOUNDS],
            "token_bounds": metrics.tokens_per_batch.bounds,
            "seq_bounds": metrics.seqs_per_batch.bounds,
            "graphs": self._coverage.whole(self._engine().get("graphs")),
        }
        return _event("model", told) + _event("numbers", self._numbers(metrics))

    def changes(self) -> bytes:
        """All numbers, and of every other call those graphs that are not what they were."""
        told = self._numbers(self._scheduler())
        self._look_at_graphs = not self._look_at_graphs
        if self._look_at_graphs and (cells := self._coverage.changes(self._engine().get("graphs"))):
            told["cells"] = cells
        return _event("numbers", told)

    def _numbers(self, metrics: SchedulerMetrics) -> dict[str, Any]:
        gateway = self._gateway
        routes = [route for path, route in gateway.routes.items() if path in self._work]
        durations = [route.seconds.counts for route in routes]
        warm_up, warm_up_histograms = self._warm_up
        now_s = time.time()
        return {
            "s": round(time.monotonic() - self._started_s, 3),
            "requests": sum(sum(route.statuses.values()) for route in routes),
            "cancelled": sum(route.cancelled for route in routes),
            "outstanding": gateway.outstanding,
            "waiting_seqs": metrics.waiting_seqs,
            "waiting_tokens": metrics.waiting_tokens,
            "running": metrics.running_batches,
            "tokenization": gateway.tokenization.counts,
            "whole": [sum(counts) for counts in zip(*durations, strict=True)],
            # Ages, since a browser's clock may differ from this one.
            "errors": [
                (kind.code, int(kind.status), gateway.errors[kind], max(0, round(now_s - last_s)))
                for kind, last_s in gateway.last_error_s.items()
            ],
            "replicas": None if self._fleet is None else self._fleet.describe(),
            **{name: round(value - warm_up[name], 3) for name, value in _counters(metrics).items()},
            **{
                name: [now - then for now, then in zip(counts, warm_up_histograms[name], strict=True)]
                for name, counts in _histograms(metrics).items()
            },
        }


def _counters(metrics: SchedulerMetrics) -> dict[str, float]:
    """What only grows, as it is now."""
    return {
        "tokens": metrics.tokens,
        "seqs": metrics.seqs,
        "batches": metrics.batches,
        "batches_failed": metrics.batches_failed,
        "busy_ms": metrics.step_ms.total,
    }


def _histograms(metrics: SchedulerMetrics) -> dict[str, list[int]]:
    """Their counts, copied: the scheduler's own go on."""
    return {
        "queue": [*metrics.queue_ms.counts],
        "step": [*metrics.step_ms.counts],
        "batch_seqs": [*metrics.seqs_per_batch.counts],
        "batch_tokens": [*metrics.tokens_per_batch.counts],
    }


def _event(name: str, told: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(told))
