"""Whether the process lives (/health), takes work (/ready), and what it serves (/info)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from gateway.drain import Drain
from gateway.errors import ApiError, ErrorKind
from gateway.exchange import Answer
from gateway.media import Media
from gateway.options import GatewayOptions
from gateway.pipeline import Scheduler, max_tokens
from gateway.replicas.replica import why_none_serves
from gateway.schemas import Status, encode
from rose.batch import EngineInfo

if TYPE_CHECKING:  # it asks replicas for these pages
    from gateway.replicas.fleet import Fleet

HEALTH_PATH, READY_PATH, INFO_PATH = "/health", "/ready", "/info"


class Health:
    """The two probes. fleet: the replicas behind `scheduler`, if there are any."""

    def __init__(self, scheduler: Scheduler, drain: Drain, fleet: Fleet | None = None) -> None:
        self._scheduler = scheduler
        self._drain = drain
        self._fleet = fleet

    def live(self) -> Answer:
        """/health: the loop turns and the engine can run steps; if not, only a restart helps.

        Raises:
            ApiError: UNAVAILABLE.
        """
        if not self._scheduler.healthy:
            raise ApiError(ErrorKind.UNAVAILABLE, "the engine is dead", closes=True)
        return _status("ok")

    def ready(self) -> Answer:
        """/ready: work sent now is accepted, unless too much waits.

        Raises:
            ApiError: UNAVAILABLE.
        """
        self._drain.check()
        self.live()
        if self._fleet is not None and not self._fleet.ready:
            raise ApiError(ErrorKind.UNAVAILABLE, why_none_serves(self._fleet.replicas))
        return _status("ready")


class Info:
    """/info: the model, the limits, and whatever `describe` adds (resolved settings, counters)."""

    def __init__(
        self,
        info: EngineInfo,
        options: GatewayOptions,
        model_names: tuple[str, ...],
        describe: Callable[[], Mapping[str, object]],
    ) -> None:
        self._static = {
            "model": {**msgspec.to_builtins(info), "outputs": info.outputs},
            "served_model_names": model_names,
            "limits": {
                "max_tokens": max_tokens(info),
                "max_items": options.max_items,
                "max_request_tokens": options.max_request_tokens,
                "max_body_bytes": options.max_body_bytes,
                "max_outstanding_requests": options.max_outstanding_requests,
                "request_timeout_s": options.request_timeout_s,
            },
            **_tei_fields(info, options),
        }
        self._describe = describe

    def __call__(self) -> Answer:
        """The page."""
        return Answer(encode({**self._static, **self._describe()}, Media.JSON), Media.JSON.value)


def _tei_fields(info: EngineInfo, options: GatewayOptions) -> dict[str, object]:
    """What TEI's clients look for, under its names."""
    return {
        "model_id": info.model,
        "model_sha": None,
        "model_dtype": info.dtype,
        "model_type": _tei_type(info),
        "max_concurrent_requests": options.max_outstanding_requests,
        "max_input_length": max_tokens(info),
        "max_batch_tokens": info.max_batch_tokens,
        "max_batch_requests": info.max_batch_seqs,
        "max_client_batch_size": options.max_items,
        "auto_truncate": False,
        "tokenization_workers": options.tokenizer_threads,
    }


def _tei_type(info: EngineInfo) -> dict[str, object]:
    """An embedder, a reranker if it has one label, or a classifier if it has several."""
    if info.task != "score":
        return {"embedding": {"pooling": info.pooling}}
    by_id = {str(index): label for index, label in enumerate(info.labels)}
    by_label = {label: index for index, label in enumerate(info.labels)}
    kind = "reranker" if len(info.labels) == 1 else "classifier"
    return {kind: {"id2label": by_id, "label2id": by_label}}


def _status(status: str) -> Answer:
    return Answer(encode(Status(status=status), Media.JSON), Media.JSON.value)
