"""What runs in an actor: a worker on a loop of its own. Knows no Ray, so that it can be run without."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.corpus.commits import Outcome
from gateway.corpus.driver import ENGINE_DEAD
from gateway.corpus.errors import CorpusError
from gateway.corpus.options import CorpusOptions, ModelSource
from gateway.corpus.plan import load_plan
from gateway.corpus.store import JOB, Store
from gateway.corpus.worker import Progress, ShardWorker
from rose.errors import EngineDeadError, EngineError, ModelLoadError
from scheduler.errors import EngineDead, SchedulerError

# Of all actors: engines that die more often will not get better.
_MOST_DEATHS = 16


class ShardActor:
    """Called with numbers of shards, from several threads; answers with outcomes, or with why there is none.

    A worker that cannot start is no reason to start it again: every call then answers with the reason.
    """

    def __init__(self, options: CorpusOptions, model: ModelSource, id_type: Any, run: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="corpus-loop", daemon=True).start()
        self._worker: ShardWorker | None = None
        self._why = ""
        try:
            self._store, self._dead = Store(options.out), f"{JOB}/dead/{run}"
            plan = load_plan(self._store)
            if plan is None:
                raise CorpusError(f"{self._store.url} cannot be seen from every node: it has no plan here")
            self._shards = {shard.index: shard for shard in plan[0]}
            self._worker = self._started(options, model, id_type, run)
        except (CorpusError, ModelLoadError, SchedulerError, EngineError) as error:
            self._why = str(error)

    def _started(self, options: CorpusOptions, model: ModelSource, id_type: Any, run: str) -> ShardWorker:
        loaded = model.load()
        if loaded.digest != model.digest:
            raise CorpusError(
                f"{model.name} is {loaded.digest} on this node and {model.digest} on the driver's"
            )

        async def start() -> ShardWorker:
            worker = ShardWorker(options, loaded, id_type, run, Progress())
            await worker.start()
            return worker

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """batch: column "shard", i64[n]. Columns "outcome" (JSON) and "error" ("": none)."""
        if self._worker is None:
            return _answer([], self._why)
        try:
            outcomes = [self._run(self._worker, int(index)) for index in batch["shard"]]
        except (EngineDead, EngineDeadError) as error:
            if self._deaths() < _MOST_DEATHS:
                os._exit(ENGINE_DEAD)  # a new process has a new engine; the cluster starts it
            return _answer([], f"engines died {_MOST_DEATHS} times; the last: {error}")
        except (CorpusError, SchedulerError, EngineError) as error:
            return _answer([], str(error))
        return _answer(outcomes, "")

    def _deaths(self) -> int:
        """Engines of this run that died, this one too."""
        self._store.write(f"{self._dead}/{secrets.token_hex(8)}", b"")
        return len(self._store.sizes(self._dead))

    def _run(self, worker: ShardWorker, index: int) -> Outcome:
        shard = self._shards[index]
        return asyncio.run_coroutine_threadsafe(worker.run(shard), self._loop).result()


def _answer(outcomes: list[Outcome], error: str) -> dict[str, list[Any]]:
    encoded = [msgspec.json.encode(outcome).decode() for outcome in outcomes] or [""]
    return {"outcome": encoded, "error": [error] * len(encoded)}
