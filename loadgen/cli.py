"""The command line: flags to a plan, and the plan's results to files and to the terminal."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import sys
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from loadgen import compare, echo
from loadgen.apis import APIS
from loadgen.plan import LoadgenError, Pacing, Source, Target
from loadgen.reference import Reference, ServerReference, TransformersReference
from loadgen.run import Plan, run
from loadgen.server_info import ask
from loadgen.suites import ALL, SUITES, Custom

NAMES = "ABCDEFGH"


def main(argv: list[str]) -> int:
    """Run one command. Returns the exit status: 0, 1 when part of it failed, 2 when it was not started."""
    parser = _parser()
    flags = parser.parse_args(argv)
    try:
        if flags.compare:
            sys.stdout.write(compare.table(compare.columns_of_files(flags.compare)))
            return 0
        if flags.suite == "echo":
            with contextlib.suppress(KeyboardInterrupt):
                uvloop.run(echo.serve(flags.port))
            return 0
        if flags.suite is None or not flags.url:
            parser.error("wants a suite and --url, or --compare")
        return run(_plan(flags))
    except (LoadgenError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def targets(urls: list[str], apis: list[str], models: list[str], api_key: str | None) -> tuple[Target, ...]:
    """One target a URL; a single --api or --model holds for all.

    Raises:
        LoadgenError: a URL is not one of this machine, or the numbers of flags do not fit.
    """
    if len(urls) > len(NAMES):
        raise LoadgenError(f"{len(urls)} URLs; {len(NAMES)} can be compared")
    found = []
    for number, (name, url) in enumerate(zip(NAMES, urls, strict=False)):
        host, port = loopback(url)
        model = _of(models, number, "--model", len(urls)) if models else None
        found.append(Target(name, host, port, _of(apis, number, "--api", len(urls)), model, api_key))
    return tuple(found)


def loopback(url: str) -> tuple[str, int]:
    """Host and port of a base URL.

    Raises:
        LoadgenError: it is no plain http URL of this machine.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError as error:
        raise LoadgenError(f"{url}: {error}") from error
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise LoadgenError(f"{url}: a base URL is http://HOST:PORT")
    if not _is_loopback(parts.hostname):
        raise LoadgenError(f"{url}: not on this machine; a load test runs against loopback only")
    return "127.0.0.1" if parts.hostname == "localhost" else parts.hostname, port


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _of(values: list[str], number: int, flag: str, count: int) -> str:
    if len(values) not in (1, count):
        raise LoadgenError(f"{flag} is given {len(values)} times for {count} URLs")
    return values[number if len(values) > 1 else 0]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadgen",
        description="Load an embedding server on this machine and report how it did. "
        "`echo` starts a server that only answers, to see what the client itself costs.",
    )
    add = parser.add_argument
    add("suite", nargs="?", choices=[*SUITES, "all", "echo"])
    add("--url", action="append", help="base URL on loopback; several are measured in turns")
    add("--api", action="append", choices=list(APIS), help="wire format (default: bouquet-msgpack)")
    add("--model", action="append", help="model name to send (default: the first that the server lists)")
    add("--api-key", help="sent as Authorization: Bearer")
    add("--compare", nargs="+", type=Path, metavar="FILE", help="set result files side by side, and end")
    add("--port", type=int, default=8200, help="of `echo`; 0: any free one")
    inputs = parser.add_argument_group("what is sent").add_argument
    inputs("--vocab-size", type=_positive, help="random ids are below this (default: what /info says)")
    inputs("--seed", type=int, default=0)
    inputs("--corpus", type=Path, help="text file or folder: send text of it instead of random ids")
    inputs("--tokenizer", type=Path, help="tokenizer.json that makes the lengths of texts exact")
    inputs("--lengths", type=_numbers, metavar="N,…", help="tokens a sequence")
    inputs("--batches", type=_numbers, metavar="N,…", help="sequences a request")
    load = parser.add_argument_group("how").add_argument
    load("--in-flight", type=_numbers, metavar="N,…", help="requests under way in each client process")
    load("--processes", type=_positive, help="client processes")
    load("--rate", type=_above_zero, help="requests a second of `open`, and of the queries of `mixed`")
    load("--loads", type=_numbers, metavar="N,…", help="`open`: percents of the maximum (default: 10,20…120)")
    load("--max-rate", type=_above_zero, help="`open`: requests a second that are 100 %% (default: measured)")
    load("--arrivals", choices=["poisson", "constant"], help="of open loops (default: `open` runs both)")
    load("--trace", type=Path, help="`trace`: JSONL with at_s and lengths or texts")
    bounds = parser.add_argument_group("how long").add_argument
    bounds("--requests", type=_positive, help="requests to measure a case")
    bounds("--duration", type=_above_zero, metavar="S", help="longest measurement of a case")
    bounds("--warmup", type=_above_zero, metavar="S", help="shortest warm-up of a case")
    bounds("--timeout", type=_above_zero, metavar="S", help="longest wait for an answer (default: 60)")
    bounds("--rounds", type=_positive, default=1, help="how often each case runs on each URL, in turns")
    bounds("--quick", action="store_true", help="seconds instead of minutes: a smoke test")
    output = parser.add_argument_group("what comes out").add_argument
    output("--check", metavar="URL|FOLDER", help="compare vectors with a server, or transformers on a folder")
    output("--check-api", choices=list(APIS), default="bouquet-msgpack", help="wire format of --check's URL")
    output(
        "--no-overhead", action="store_true", help="do not measure the client against an echo server first"
    )
    output("--json", type=Path, metavar="FILE", help="write everything measured there")
    output("--report", type=Path, metavar="FOLDER", help="write JSON, Markdown, HTML, .hgrm and PNG there")
    return parser


def _plan(flags: argparse.Namespace) -> Plan:
    names = ALL if flags.suite == "all" else (flags.suite,)
    custom = _custom(flags)
    return Plan(
        targets=targets(flags.url, flags.api or ["bouquet-msgpack"], flags.model or [], flags.api_key),
        cases=tuple(case for name in names for case in SUITES[name](custom)),
        source=Source(flags.vocab_size or 0, flags.seed, flags.corpus, flags.tokenizer),
        rounds=flags.rounds,
        max_rate=flags.max_rate,
        overhead=not flags.no_overhead,
        reference=_reference(flags.check, flags.check_api, flags.api_key) if flags.check else None,
        json=flags.json,
        report=flags.report,
    )


def _custom(flags: argparse.Namespace) -> Custom:
    return Custom(
        lengths=flags.lengths,
        batches=flags.batches,
        in_flight=flags.in_flight,
        processes=flags.processes,
        requests=flags.requests,
        rate=flags.rate,
        loads=flags.loads,
        arrivals=Pacing(flags.arrivals) if flags.arrivals else None,
        duration_s=flags.duration,
        warmup_s=flags.warmup,
        timeout_s=flags.timeout,
        trace=flags.trace,
        quick=flags.quick,
    )


def _reference(where: str, api: str, api_key: str | None) -> Reference:
    if "://" not in where:
        return TransformersReference(Path(where))
    (target,) = targets([where], [api], [], api_key)
    return ServerReference(ask(target)[0])
