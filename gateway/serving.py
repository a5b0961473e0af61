"""A port, and behind it, once they are there, the rooms: loads, serves until told to end, drains.

Which model that is, and how it is loaded, `server.py` says: of the engine this room knows the contract alone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from gateway.announcement import announcement
from gateway.app import create_app
from gateway.balancer import Balancer
from gateway.drain import DRAIN
from gateway.exchange import PLAIN_ROUTES
from gateway.options import GatewayOptions
from gateway.process import beside, ended_within, leave, quiet_collector
from gateway.rehearsal import NearingEngine, RequestRehearsal
from gateway.replicas import parent
from gateway.replicas.fleet import Fleet
from gateway.replicas.options import ReplicaOptions
from gateway.replicas.processes import ChildFailed, ChildProcess
from gateway.replicas.replica import why_none_serves
from gateway.startup import Port
from gateway.tokenization.late import LateTokenizer
from gateway.tokenization.loading import load_tokenizer
from rose.batch import Engine, EngineInfo
from rose.errors import EngineError
from scheduler.batcher import Batcher
from scheduler.errors import SchedulerError
from scheduler.options import SchedulerOptions
from scheduler.warmup import measure, warm_up

if TYPE_CHECKING:  # for servers that trace only
    from gateway.tracing import Tracing

STARTED_S = time.perf_counter()
# Seconds that a shutdown adds to the drain for writing out the last answers.
CLOSE_S = 5.0
ENGINE_DEAD = 3

logger = logging.getLogger("server")


class StartError(Exception):
    """The server cannot start; the message is one line that says what to do."""


class Folder(Protocol):
    """A model's files; see rose.model_source.ModelFolder."""

    @property
    def path(self) -> Path: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def origin(self) -> str: ...  # noqa: D102
    @property
    def revision(self) -> str | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Model:
    """Which model is served.

    find: its files, after a download perhaps. load: an engine for them; torch is imported here. known: what
    replicas must say of it. processes: engines on these devices, not running yet.

    Raises:
        rose.errors.ModelLoadError: of find, load and known.
    """

    find: Callable[[], Folder]
    load: Callable[[Folder], Engine]
    known: Callable[[Folder], Mapping[str, object]]
    processes: Callable[[Sequence[str]], list[ChildProcess]]


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """How it is served.

    tokenizer: a tokenizer.json; None: the model folder's, if it has one.
    drain_s: seconds that a shutdown gives accepted requests.
    traces: the OTLP collector's URL; "": as the OTEL_* variables say; None: none.
    replicas: where the engines are; None: there is one, in this process.
    replica_of: the process that started this one as its engine; None: nobody did.
    settings: all of the server's, for /info. version: the server's.
    """

    gateway: GatewayOptions
    scheduler: SchedulerOptions
    tokenizer: Path | None
    drain_s: float
    traces: str | None
    replicas: ReplicaOptions | None
    replica_of: int | None
    settings: Mapping[str, object]
    version: str


@dataclass(frozen=True, slots=True)
class Backend:
    """What runs sequences: an engine in this process, or the replicas of a fleet.

    describe: what /info says of it. close: frees what it holds; whether that ended in time.
    engine: the one in this process.
    """

    scheduler: Batcher | Balancer
    info: EngineInfo
    stats: Callable[[], Mapping[str, object]]
    close: Callable[[], Awaitable[bool]]
    fleet: Fleet | None = None
    engine: Engine | None = None

    def describe(self) -> dict[str, object]:
        """What /info says of it."""
        return {"engine": self.stats()} | ({"replicas": self.fleet.describe()} if self.fleet else {})


def find_tokenizer(options: ServingOptions, folder: Folder) -> LateTokenizer | None:
    """The named tokenizer, or the folder's; None if there is neither."""
    if options.replica_of is not None:
        return None
    path = options.tokenizer or folder.path / "tokenizer.json"
    if options.tokenizer is None and not path.is_file():
        logger.warning("%s has no tokenizer.json: token ids only, unless --tokenizer names one", folder.path)
        return None
    return load_tokenizer(path)


def start_tracing(endpoint: str | None, version: str) -> Tracing | None:
    """What makes traces and sends them; nothing of it is even imported where none are wanted.

    Raises:
        StartError: the packages for it are missing.
    """
    if endpoint is None:
        return None
    try:
        from gateway.tracing import Tracing
    except ModuleNotFoundError as error:
        raise StartError(f"traces need the extra `otel`: pip install -e '.[otel]' ({error})") from error
    return Tracing.exporting(endpoint, version)


class Server:
    """A port, and once the model is loaded, the rooms behind it."""

    def __init__(self, options: ServingOptions, model: Model, port: Port) -> None:
        self._options = options
        self._model = model
        self._port = port
        self._tracing: Tracing | None = None
        self._rehearsal: RequestRehearsal | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serve until a signal or the engine's death; the exit status.

        Raises:
            StartError, ModelLoadError: the server could not start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._options.replica_of is not None:
            parent.when_told(lambda: self._end("the gateway has ended"))
        await self._port.open(dashboard=self._options.gateway.dashboard)
        starting = loop.create_task(self._start())
        first: list[asyncio.Future[Any]] = [starting, self._ended]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            leave(self._ended.result())
        backend, app = starting.result()
        status = await self._ended
        await self._stop(app, backend, 0.0 if status == ENGINE_DEAD else self._options.drain_s)
        if status == ENGINE_DEAD or not await backend.close():
            leave(status)
        return status

    async def _start(self) -> tuple[Backend, web.Application]:
        options = self._options
        self._tracing = start_tracing(options.traces, options.version)
        resolving = beside(self._model.find)
        loading = None
        if options.replicas is None:
            loading = beside(lambda: self._model.load(resolving.result()))
        folder = await asyncio.wrap_future(resolving)
        logger.info("loading %s from %s: %s", folder.name, folder.origin, folder.path)
        tokenizer = await asyncio.to_thread(find_tokenizer, options, folder)
        backend = await self._backend(loading, folder)
        app = self._application(folder, tokenizer, backend)
        await self._rehearse(app, backend)
        await self._port.serve(app)
        quiet_collector()
        ready_s = time.perf_counter() - STARTED_S
        lines = announcement(options.gateway, backend.info, self._port, text=tokenizer is not None)
        # Not logged: whatever the log's level, this is said.
        print(f"ready after {ready_s:.1f} s {lines}", flush=True)  # noqa: T201
        if tokenizer is not None:
            tokenizer.start()
        return backend, app

    async def _backend(self, loading: Future[Engine] | None, folder: Folder) -> Backend:
        if loading is not None:
            return await self._engine(loading)
        assert self._options.replicas is not None
        return await self._replicas(self._options.replicas, folder)

    async def _engine(self, loading: Future[Engine]) -> Backend:
        """The engine that is being loaded, warm."""
        engine = await asyncio.wrap_future(loading)
        try:
            batcher = Batcher(engine, await self._timed(engine), on_dead=self._on_dead)
            await batcher.start()
            await warm_up(batcher, engine.info)
        except (SchedulerError, EngineError, TimeoutError) as error:
            raise StartError(f"the model's first step failed: {str(error) or 'it did not end'}") from error
        closing = partial(ended_within, CLOSE_S, engine.close)
        return Backend(batcher, engine.info, engine.stats, closing, engine=engine)

    async def _replicas(self, replicas: ReplicaOptions, folder: Folder) -> Backend:
        """Replicas, of which at least one serves."""
        children = self._model.processes(replicas.devices)
        known = self._model.known(folder)
        fleet = Fleet(replicas, self._options.scheduler, known, children, self._tracing)
        logger.info("waiting for replicas; until one serves, %s answers 503", self._port.url)
        if not children:
            self._port.why_not_ready = lambda: why_none_serves(fleet.replicas)
        try:
            balancer = await fleet.start()
        except ChildFailed as error:
            await fleet.close(0.0)
            raise StartError(str(error)) from error

        async def close() -> bool:
            await fleet.close(CLOSE_S)
            return True

        return Backend(balancer, fleet.info, dict, close, fleet)

    def _application(
        self, folder: Folder, tokenizer: LateTokenizer | None, backend: Backend
    ) -> web.Application:
        static: dict[str, object] = {"version": self._options.version, "origin": folder.origin}
        static["settings"] = self._options.settings
        return create_app(
            self._options.gateway,
            backend.scheduler,
            backend.info,
            tokenizer,
            describe=lambda: {
                **static,
                "tokenizer": None if tokenizer is None else tokenizer.backend,
                "revision": folder.revision,
                **backend.describe(),
            },
            engine_stats=backend.stats,
            fleet=backend.fleet,
            tracing=self._tracing,
        )

    async def _rehearse(self, app: web.Application, backend: Backend) -> None:
        """Answer requests twice where that makes answers sooner: see `gateway.rehearsal`."""
        engine, routes = backend.engine, app.get(PLAIN_ROUTES)
        if isinstance(engine, NearingEngine) and routes is not None:
            try:
                self._rehearsal = await RequestRehearsal.start(self._options.gateway, backend.info, routes)
                engine.on_near = self._rehearsal.run
            except Exception as error:  # no loopback of IPv4, no descriptor or thread left: it goes without
                logger.warning("requests are not rehearsed: %s", error)

    async def _timed(self, engine: Engine) -> SchedulerOptions:
        """The scheduler's options with the times of a device's steps; a CPU's would take seconds."""
        options = self._options.scheduler
        if not engine.info.device.startswith("cuda"):
            return options
        async with asyncio.timeout(options.step_timeout_s):
            return replace(options, cost_points=await measure(engine, options.max_budget_tokens))

    async def _stop(self, app: web.Application, backend: Backend, drain_s: float) -> None:
        """Refuse what is new, finish what was accepted, then close from the outside in."""
        ends_s = time.perf_counter() + drain_s + CLOSE_S
        await app[DRAIN].run(drain_s)
        await backend.scheduler.close(0.0)
        if self._rehearsal is not None:
            await self._rehearsal.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._port.close()
        except TimeoutError:
            logger.warning("some clients did not read their answers within %s s", CLOSE_S)
        if self._tracing is not None:
            left_s = max(0.0, ends_s - time.perf_counter())
            if not await ended_within(left_s, self._tracing.close):
                logger.warning("the last traces could not be sent within %.3g s", left_s)

    def _on_signal(self, number: int) -> None:
        if self._options.replica_of is not None:
            return  # the gateway has it, too, or its user: it drains first, and then ends this process
        if self._ended.done():
            leave(128 + number)
        self._end(f"signal {number}")

    def _end(self, why: str) -> None:
        logger.info("%s: draining for up to %s s", why, self._options.drain_s)
        if not self._ended.done():
            self._ended.set_result(0)

    def _on_dead(self, reason: str) -> None:
        print(f"error: the engine is dead: {reason}", file=sys.stderr, flush=True)  # noqa: T201
        if not self._ended.done():
            self._ended.set_result(ENGINE_DEAD)
