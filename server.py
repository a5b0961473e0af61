"""Bouquet's command line and composition root: the only file that sees every room, argv and the environment.

argv -> frozen options -> bind the port -> load the model beside the loop -> serve -> drain.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop
from aiohttp import web

from gateway import flags as gateway_flags
from gateway import listening, verification
from gateway.announcement import announcement
from gateway.app import create_app
from gateway.drain import DRAIN
from gateway.listening import ListenError, ListenOptions, take_port
from gateway.options import GatewayOptions
from gateway.process import beside, ended_within, leave, quiet_collector, set_up_logging
from gateway.startup import Port
from gateway.tokenization.late import LateTokenizer
from gateway.tokenization.loading import load_tokenizer
from gateway.verification_texts import TEXTS
from rose import flags as rose_flags
from rose.batch import Engine
from rose.config import load_config
from rose.engine_options import EngineOptions
from rose.errors import EngineError, ModelLoadError
from rose.model_source import LoadFormat, ModelFolder, resolve
from scheduler import flags as scheduler_flags
from scheduler.batcher import Batcher
from scheduler.errors import SchedulerError
from scheduler.options import SchedulerOptions
from scheduler.warmup import measure, warm_up

if TYPE_CHECKING:  # for servers that trace only
    from gateway.tracing import Tracing

VERSION = "0.1.0"
STARTED_S = time.perf_counter()
# Seconds that a shutdown adds to --drain-s for writing out the last answers.
CLOSE_S = 5.0
START_FAILED, BAD_USAGE, ENGINE_DEAD = 1, 2, 3

logger = logging.getLogger("server")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything that the command line and the environment decide.

    tokenizer: a tokenizer.json; None: the model folder's, if it has one.
    drain_s: seconds that a shutdown gives accepted requests.
    traces: the OTLP collector's URL; "": as the OTEL_* variables say; None: none.
    """

    model: str
    load_format: LoadFormat
    tokenizer: Path | None
    drain_s: float
    log_level: str
    traces: str | None
    listen: ListenOptions
    engine: EngineOptions
    scheduler: SchedulerOptions
    gateway: GatewayOptions


class StartError(Exception):
    """The server cannot start; the message is one line that says what to do."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of thirty flags around it."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"error: {message} (see --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """All flags, each with its unit and consequence."""
    parser = _Parser(
        prog="server.py",
        description="Serve an embedding model over HTTP: POST /v1/embeddings, JSON or msgpack.",
        epilog="Environment: BOUQUET_API_KEY is one more --api-key; HF_HUB_OFFLINE=1 keeps off the network; "
        "OMP_WAIT_POLICY=ACTIVE lets the CPU's threads spin between forwards, which pays on idle cores only.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"bouquet {VERSION}")
    rose_flags.add_model_flags(parser.add_argument_group("model"))
    http = parser.add_argument_group("HTTP")
    listening.add_flags(http)
    gateway_flags.add_http_flags(http)
    http.add_argument(
        "--drain-s",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="after SIGTERM or Ctrl-C accepted requests may take so long, then they get 503; a second signal "
        "ends the process at once; default: %(default)s",
    )
    http.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="debug adds a line a request; default: %(default)s",
    )
    gateway_flags.add_limit_flags(parser.add_argument_group("limits of a request"))
    batches = parser.add_argument_group("batches and memory")
    rose_flags.add_engine_flags(batches)
    scheduler_flags.add_flags(batches)
    return parser


def parse_options(argv: Sequence[str] | None = None) -> ServerOptions:
    """Options of `argv` (None: the process's) and BOUQUET_API_KEY; exits with one line if they are wrong."""
    parser = build_parser()
    args = parser.parse_args(argv)
    key = os.environ.get("BOUQUET_API_KEY")
    if not 0 <= args.drain_s < float("inf"):
        parser.error(f"argument --drain-s: {args.drain_s} is not a number of seconds")
    try:
        return ServerOptions(
            model=args.model,
            load_format=args.load_format,
            tokenizer=args.tokenizer,
            drain_s=args.drain_s,
            log_level=args.log_level,
            traces=gateway_flags.traces_endpoint(args, os.environ),
            listen=listening.listen_options(args),
            engine=rose_flags.engine_options(args),
            scheduler=scheduler_flags.scheduler_options(args, args.max_batch_tokens),
            gateway=gateway_flags.gateway_options(args, [key] if key else []),
        )
    except ValueError as error:
        parser.error(str(error))


def describe(options: ServerOptions) -> dict[str, object]:
    """The settings as plain values, for the block at start and for /info. Keys are counted, not shown."""
    settings = asdict(options)
    settings["tokenizer"] = str(options.tokenizer) if options.tokenizer else "the model's own"
    for name, value in settings["listen"].items():
        settings["listen"][name] = str(value) if isinstance(value, Path) else value
    settings["gateway"]["api_keys"] = len(options.gateway.api_keys)
    return settings


def print_settings(settings: Mapping[str, object]) -> None:
    """One block: a line for the server and one for each room."""
    rooms = {name: value for name, value in settings.items() if isinstance(value, dict)}
    server = {name: value for name, value in settings.items() if name not in rooms}
    print(f"bouquet {VERSION}, process {os.getpid()}")
    for room, values in {"server": server, **rooms}.items():
        print(f"  {room:<10}{' '.join(f'{name}={value!r}' for name, value in values.items())}")
    sys.stdout.flush()


def load(options: ServerOptions, folder: ModelFolder) -> Engine:
    """Import torch and load the model: seconds, and for large models minutes."""
    load_config(folder.path)  # what is wrong with it shows now, not after the seconds that torch takes
    from rose.engine import load_engine

    dummy = options.load_format == "dummy"
    return load_engine(folder.path, options.engine, dummy=dummy, model_name=folder.name)


def find_tokenizer(options: ServerOptions, folder: ModelFolder) -> LateTokenizer | None:
    """The named tokenizer, or the folder's; None if there is neither."""
    path = options.tokenizer or folder.path / "tokenizer.json"
    if options.tokenizer is None and not path.is_file():
        logger.warning("%s has no tokenizer.json: token ids only, unless --tokenizer names one", folder.path)
        return None
    return load_tokenizer(path)


def start_tracing(endpoint: str | None) -> Tracing | None:
    """What makes traces and sends them; nothing of it is even imported where none are wanted.

    Raises:
        StartError: the packages for it are missing.
    """
    if endpoint is None:
        return None
    try:
        from gateway.tracing import Tracing
    except ModuleNotFoundError as error:
        raise StartError(f"traces need the extra `otel`: pip install 'bouquet[otel]' ({error})") from error
    return Tracing.exporting(endpoint, VERSION)


class Server:
    """A port, and once the model is loaded, the rooms behind it."""

    def __init__(self, options: ServerOptions, port: Port) -> None:
        self._options = options
        self._port = port
        self._tracing: Tracing | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serve until a signal or the engine's death; the exit status.

        Raises:
            StartError, ModelLoadError: the server could not start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._port.open()
        starting = loop.create_task(self._start())
        first: list[asyncio.Future[Any]] = [starting, self._ended]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            leave(self._ended.result())
        engine, batcher, app = starting.result()
        status = await self._ended
        await self._stop(app, batcher, 0.0 if status == ENGINE_DEAD else self._options.drain_s)
        if status == ENGINE_DEAD or not await ended_within(CLOSE_S, engine.close):
            leave(status)
        return status

    async def _start(self) -> tuple[Engine, Batcher, web.Application]:
        options = self._options
        self._tracing = start_tracing(options.traces)
        resolving = beside(lambda: resolve(options.model, options.load_format))
        loading = beside(lambda: load(options, resolving.result()))
        folder = await asyncio.wrap_future(resolving)
        logger.info("loading %s from %s: %s", folder.name, folder.origin, folder.path)
        tokenizer = await asyncio.to_thread(find_tokenizer, options, folder)
        engine = await asyncio.wrap_future(loading)
        try:
            batcher = Batcher(engine, await self._timed(engine), on_dead=self._on_dead)
            await batcher.start()
            await warm_up(batcher, engine.info)
        except (SchedulerError, EngineError, TimeoutError) as error:
            raise StartError(f"the model's first step failed: {str(error) or 'it did not end'}") from error
        app = self._application(folder, tokenizer, engine, batcher)
        await self._port.serve(app)
        quiet_collector()
        ready_s = time.perf_counter() - STARTED_S
        lines = announcement(options.gateway, engine.info, self._port, text=tokenizer is not None)
        print(f"ready after {ready_s:.1f} s {lines}", flush=True)
        if tokenizer is not None:
            tokenizer.start()
        return engine, batcher, app

    def _application(
        self, folder: ModelFolder, tokenizer: LateTokenizer | None, engine: Engine, batcher: Batcher
    ) -> web.Application:
        static: dict[str, object] = {"version": VERSION, "origin": folder.origin}
        static["settings"] = describe(self._options)
        return create_app(
            self._options.gateway,
            batcher,
            engine.info,
            tokenizer,
            describe=lambda: {
                **static,
                "tokenizer": None if tokenizer is None else tokenizer.backend,
                "revision": folder.revision,
                "engine": engine.stats(),
            },
            engine_stats=engine.stats,
            tracing=self._tracing,
        )

    async def _timed(self, engine: Engine) -> SchedulerOptions:
        """The scheduler's options with the times of a device's steps; a CPU's would take seconds."""
        options = self._options.scheduler
        if not engine.info.device.startswith("cuda"):
            return options
        async with asyncio.timeout(options.step_timeout_s):
            return replace(options, cost_points=await measure(engine, options.max_budget_tokens))

    async def _stop(self, app: web.Application, batcher: Batcher, drain_s: float) -> None:
        """Refuse what is new, finish what was accepted, then close from the outside in."""
        ends_s = time.perf_counter() + drain_s + CLOSE_S
        await app[DRAIN].run(drain_s)
        await batcher.close(0.0)
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
        if self._ended.done():
            leave(128 + number)
        logger.info("signal %d: draining for up to %s s", number, self._options.drain_s)
        self._ended.set_result(0)

    def _on_dead(self, reason: str) -> None:
        print(f"error: the engine is dead: {reason}", file=sys.stderr, flush=True)
        if not self._ended.done():
            self._ended.set_result(ENGINE_DEAD)


def verify(argv: Sequence[str]) -> int:
    """Compare what a model gives with what its authors' code gives; 0 if all is near enough, else 1."""
    parser = _Parser(prog="server.py verify", description="Compare a model with transformers, text by text.")
    rose_flags.add_model_flags(parser.add_argument_group("model"))
    rose_flags.add_engine_flags(parser.add_argument_group("batches and memory"))
    verification.add_flags(parser)
    args = parser.parse_args(argv)
    set_up_logging("warning")
    from rose.engine import load_engine
    from rose.oracle import TransformersOracle

    try:
        folder = resolve(args.model, args.load_format)
        path = folder.path / "tokenizer.json"
        tokenizer = load_tokenizer(path) if path.is_file() else None
        if tokenizer is not None:
            tokenizer.start()
        engine = load_engine(
            folder.path, rose_flags.engine_options(args), dummy=False, model_name=folder.name
        )
        oracle = TransformersOracle(folder.path, load_config(folder.path))
        compared = None if tokenizer is None else tokenizer.wait()
        findings = verification.verify(TEXTS, compared, engine, oracle)
    except (ModelLoadError, EngineError) as error:
        return failed(error)
    wanted = verification.criterion(engine.info, args)
    print("\n".join(verification.describe(findings, wanted)))
    return 0 if verification.passed(findings, wanted) else START_FAILED


def yield_between_forwards() -> None:
    """Have OpenMP's threads sleep between parallel regions, unless the environment says otherwise.

    libgomp reads this once, when torch loads it. By default its threads spin for the next region, which takes
    the cores from those who have work: with two threads on two cores at a load of 7 to 9 a short text took
    496 to 845 ms spinning and 6 to 7 ms so.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_tokenizer_threads(count: int) -> None:
    """Have the `tokenizers` library take so many threads for a list, unless the environment says otherwise.

    It reads this once, at its first list. By default it has a thread for each core, however many those are,
    and the event loop no core of its own.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))


def failed(error: Exception) -> int:
    """Say in one line why nothing could be done."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return START_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop, or do what the first argument names; the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    yield_between_forwards()
    if arguments[:1] == ["verify"]:
        return verify(arguments[1:])
    options = parse_options(arguments)
    limit_tokenizer_threads(options.gateway.tokenizer_threads)
    set_up_logging(options.log_level)
    print_settings(describe(options))

    async def serve(port: Port) -> int:
        return await Server(options, port).run()

    try:
        return uvloop.run(serve(take_port(options.listen)))
    except (ListenError, StartError, ModelLoadError) as error:
        leave(failed(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
