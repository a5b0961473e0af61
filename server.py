"""Bouquet's command line and composition root: the only file that sees every room, argv and the environment.

argv -> frozen options -> bind the port -> load the model beside the loop -> serve -> drain.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if __name__ == "__main__" and sys.argv[1:2] != ["corpus"]:  # whose processes exchange what they import
    from rose.aot.compiled_loop import use_compiled_loop

    LOOP = use_compiled_loop()
else:
    LOOP = "interpreted"

import uvloop

from gateway import flags as gateway_flags
from gateway import listening, verification, verification_findings
from gateway.listening import ListenError, ListenOptions, take_port
from gateway.options import GatewayOptions
from gateway.process import leave, limit_tokenizer_threads, set_up_logging, yield_between_forwards
from gateway.replicas import flags as replica_flags
from gateway.replicas import parent
from gateway.replicas.options import ReplicaOptions
from gateway.replicas.processes import ChildProcess, child_processes
from gateway.serving import Folder, Model, Server, ServingOptions, StartError
from gateway.startup import Port
from gateway.tokenization.loading import load_tokenizer
from gateway.verification_texts import TEXTS
from rose import flags as rose_flags
from rose.batch import Engine
from rose.config import load_config
from rose.engine_options import EngineOptions
from rose.errors import EngineError, ModelLoadError
from rose.model_source import LoadFormat, resolve
from scheduler import flags as scheduler_flags
from scheduler.options import SchedulerOptions

if TYPE_CHECKING:
    from gateway.corpus.options import LoadedModel

VERSION = "0.1.0"
START_FAILED, BAD_USAGE = 1, 2


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Everything that the command line and the environment decide.

    tokenizer: a tokenizer.json; None: the model folder's, if it has one.
    drain_s: seconds that a shutdown gives accepted requests.
    traces: the OTLP collector's URL; "": as the OTEL_* variables say; None: none.
    replicas: where the engines are; None: there is one, in this process.
    replica_of: the process that started this one as its engine; None: nobody did.
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
    replicas: ReplicaOptions | None
    replica_of: int | None


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
    _add_engine_flags(parser)
    _add_gateway_flags(parser)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    rose_flags.add_model_flags(parser.add_argument_group("model"))
    rose_flags.add_engine_flags(parser.add_argument_group("batches and memory"))


def _add_gateway_flags(parser: argparse.ArgumentParser) -> None:
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
    scheduler_flags.add_flags(parser.add_argument_group("what may wait"))
    replica_flags.add_flags(parser.add_argument_group("replicas"))


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
            replicas=replica_flags.replica_options(args, os.environ),
            replica_of=args.replica_of,
        )
    except ValueError as error:
        parser.error(_in_flags(str(error), vars(args)))


def _in_flags(message: str, flags: Mapping[str, object]) -> str:
    """`message` with the flags that set them in place of the options' own names."""
    return re.sub(
        r"\b\w+_\w+", lambda name: f"--{name[0].replace('_', '-')}" if name[0] in flags else name[0], message
    )


def describe(options: ServerOptions) -> dict[str, object]:
    """The settings as plain values, for the block at start and for /info. Keys are counted, not shown."""
    settings = asdict(options)
    settings["tokenizer"] = str(options.tokenizer) if options.tokenizer else "the model's own"
    for name, value in settings["listen"].items():
        settings["listen"][name] = str(value) if isinstance(value, Path) else value
    settings["loop"] = LOOP
    settings["gateway"]["api_keys"] = len(options.gateway.api_keys)
    if options.replicas is not None:
        settings["replicas"] = options.replicas.describe()
    return settings


def print_settings(settings: Mapping[str, object]) -> None:
    """One block: a line for the server and one for each room."""
    rooms = {name: value for name, value in settings.items() if isinstance(value, dict)}
    server = {name: value for name, value in settings.items() if name not in rooms}
    print(f"bouquet {VERSION}, process {os.getpid()}")
    for room, values in {"server": server, **rooms}.items():
        print(f"  {room:<10}{' '.join(f'{name}={value!r}' for name, value in values.items())}")
    sys.stdout.flush()


def serving_options(options: ServerOptions) -> ServingOptions:
    """What of them the gateway needs to know."""
    return ServingOptions(
        gateway=options.gateway,
        scheduler=options.scheduler,
        tokenizer=options.tokenizer,
        drain_s=options.drain_s,
        traces=options.traces,
        replicas=options.replicas,
        replica_of=options.replica_of,
        settings=describe(options),
        version=VERSION,
    )


def model_of(options: ServerOptions) -> Model:
    """The model that they name."""
    return Model(
        find=lambda: resolve(options.model, options.load_format, weights=_has_engine(options)),
        load=partial(load, options),
        known=known,
        processes=partial(engine_processes, options),
    )


def _has_engine(options: ServerOptions) -> bool:
    return options.replicas is None or bool(options.replicas.devices)


def load(options: ServerOptions, folder: Folder) -> Engine:
    """Import torch and load the model: seconds, and for large models minutes."""
    load_config(folder.path)  # what is wrong with it shows now, not after the seconds that torch takes
    from rose.engine import load_engine

    dummy, pickles = options.load_format == "dummy", options.load_format != "safetensors"
    return load_engine(folder.path, options.engine, dummy=dummy, model_name=folder.name, pickles=pickles)


def known(folder: Folder) -> dict[str, object]:
    """What replicas must say of the model, as far as its files know it."""
    config = load_config(folder.path)
    fields = ("architecture", "dimensions", "vocab_size", "pooling", "normalize", "type_vocab_size", "task")
    return {"model": folder.name, "revision": folder.revision} | {
        field: getattr(config, field) for field in fields
    }


def engine_processes(options: ServerOptions, devices: Sequence[str]) -> list[ChildProcess]:
    """An engine on each of `devices`: this command line once more, without what concerns clients."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    _add_gateway_flags(parser)
    arguments = sys.argv[1:]
    python = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]]
    flags = parser.parse_known_args(arguments)[1]
    flags += ["--replica-of", str(os.getpid()), "--step-timeout-s", str(options.scheduler.step_timeout_s)]
    flags += ["--log-level", options.log_level, "--drain-s", str(options.drain_s)]
    if "cpu" in devices and options.engine.num_threads is None:
        flags += ["--threads", str(max(1, len(os.sched_getaffinity(0)) // len(devices)))]
    return child_processes([*python, *flags], devices, os.environ)


def verify(argv: Sequence[str]) -> int:
    """Compare what a model gives with what its authors' code gives; 0 if all is near enough, else 1."""
    args = verify_parser().parse_args(argv)
    set_up_logging("warning")
    from rose.engine import load_engine
    from rose.oracle import TransformersOracle

    try:
        folder = resolve(args.model, args.load_format)
        path = folder.path / "tokenizer.json"
        tokenizer = load_tokenizer(path) if path.is_file() else None
        if tokenizer is not None:
            tokenizer.start()
        options, pickles = rose_flags.engine_options(args), args.load_format != "safetensors"
        engine = load_engine(folder.path, options, dummy=False, model_name=folder.name, pickles=pickles)
        oracle = TransformersOracle(folder.path, load_config(folder.path))
        compared = None if tokenizer is None else tokenizer.wait()
        wanted = verification_findings.criteria(engine.info, args)
        found = verification.verify(TEXTS, compared, engine, oracle, wanted)
    except (ModelLoadError, EngineError) as error:
        return failed(error)
    print("\n".join(verification_findings.describe(found, wanted)))
    return 0 if verification_findings.passed(found, wanted) else START_FAILED


def verify_parser() -> argparse.ArgumentParser:
    """All flags of `verify`."""
    parser = _Parser(prog="server.py verify", description="Compare a model with transformers, text by text.")
    rose_flags.add_model_flags(parser.add_argument_group("model"))
    rose_flags.add_engine_flags(parser.add_argument_group("batches and memory"))
    verification_findings.add_flags(parser)
    return parser


def corpus(argv: Sequence[str]) -> int:
    """Embed files, or say what that would take; see docs/corpus.md. The exit status."""
    from gateway.corpus import flags
    from gateway.corpus.digest import model_digest
    from gateway.corpus.options import ModelSource

    parser = corpus_parser()
    args = parser.parse_args(argv)
    try:
        if args.plan is not None:
            print(flags.planned(args))
            return 0
        options, ray = flags.corpus_options(args, os.environ), flags.ray_options(args)
    except ValueError as error:
        parser.error(str(error))
    set_up_logging("warning", sys.stderr)
    limit_tokenizer_threads(options.tokenizer_threads)
    try:
        from gateway.corpus import command

        digest = model_digest(resolve(args.model, args.load_format).path, args.load_format, args.seed)
        # By its own name, not __main__: other processes import it.
        load = partial(importlib.import_module("server").load_model, args)
        return command.run(options, ray, ModelSource(args.model, digest, args.dtype, load), VERSION)
    except ModuleNotFoundError as error:
        extra = "lance" if error.name == "lance" else "corpus"
        return failed(StartError(f"this needs the extra `{extra}`: pip install -e '.[{extra}]' ({error})"))
    except (ModelLoadError, StartError) as error:
        return failed(error)


def corpus_parser() -> argparse.ArgumentParser:
    """All flags of `corpus`."""
    from gateway.corpus import flags

    parser = _Parser(prog="server.py corpus", description="Embed the rows of files.", allow_abbrev=False)
    flags.add_flags(parser)
    rose_flags.add_model_flags(parser.add_argument_group("model"))
    rose_flags.add_engine_flags(parser.add_argument_group("batches and memory"))
    return parser


def load_model(args: argparse.Namespace) -> LoadedModel:
    """The model that a corpus is embedded with, as the flags say; blocks for seconds.

    Raises:
        ModelLoadError: it cannot be loaded, or has no tokenizer.
    """
    from gateway.corpus.digest import model_digest
    from gateway.corpus.options import LoadedModel
    from rose.engine import load_engine

    yield_between_forwards()
    folder = resolve(args.model, args.load_format)
    path = folder.path / "tokenizer.json"
    if not path.is_file():
        advice = "give --model a folder that has one beside its config.json"
        if args.load_format == "dummy":
            advice += ", or leave out --load-format dummy"
        raise ModelLoadError(f"{args.model} has no tokenizer.json here; {advice}")
    tokenizer = load_tokenizer(path)
    tokenizer.start()
    dummy, pickles = args.load_format == "dummy", args.load_format != "safetensors"
    options = rose_flags.engine_options(args)
    engine = load_engine(folder.path, options, dummy=dummy, model_name=folder.name, pickles=pickles)
    digest = model_digest(folder.path, args.load_format, args.seed)
    ceiling = args.max_batch_tokens or SchedulerOptions().max_budget_tokens
    floor = min(SchedulerOptions().min_budget_tokens, ceiling)
    scheduler = SchedulerOptions(min_budget_tokens=floor, max_budget_tokens=ceiling)
    return LoadedModel(engine, tokenizer, digest, scheduler)


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
    if arguments[:1] == ["corpus"]:
        return corpus(arguments[1:])
    options = parse_options(arguments)
    if options.replica_of is not None:
        parent.die_with(options.replica_of)
    limit_tokenizer_threads(options.gateway.tokenizer_threads)
    set_up_logging(options.log_level)
    print_settings(describe(options))

    async def serve(port: Port) -> int:
        return await Server(serving_options(options), model_of(options), port).run()

    try:
        return uvloop.run(serve(take_port(options.listen)))
    except (ListenError, StartError, ModelLoadError) as error:
        leave(failed(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    leave(main())
