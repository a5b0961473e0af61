"""The command line: from flags to a plan that is run."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import sys
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from loadgen import compare, echo
from loadgen.flags import parser
from loadgen.plan import LoadgenError, Pacing, Source, Target
from loadgen.reference import Reference, ServerReference, TransformersReference
from loadgen.run import Plan, run
from loadgen.served_model import ask
from loadgen.suites import ALL, SUITES, Custom

NAMES = "ABCDEFGH"


def main(argv: list[str]) -> int:
    """Run one command. Returns the exit status: 0, 1 when part of it failed, 2 when it was not started."""
    flags = (made := parser()).parse_args(argv)
    try:
        if flags.compare:
            sys.stdout.write(compare.table(compare.columns_of_files(flags.compare)))
            return 0
        if flags.suite == "echo":
            with contextlib.suppress(KeyboardInterrupt):
                uvloop.run(echo.serve(flags.port))
            return 0
        if flags.suite is None or not flags.url:
            made.error("wants a suite and --url, or --compare")
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
        resume=flags.resume,
        budget_s=flags.budget_s,
        lines=flags.lines,
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
        max_warmup_s=flags.max_warmup,
        timeout_s=flags.timeout,
        trace=flags.trace,
        quick=flags.quick,
    )


def _reference(where: str, api: str, api_key: str | None) -> Reference:
    if "://" not in where:
        return TransformersReference(Path(where))
    (target,) = targets([where], [api], [], api_key)
    return ServerReference(ask(target)[0])
