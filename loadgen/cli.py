"""The command line: flags to a plan, and the plan's results to files and to the terminal."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from pathlib import Path
from urllib.parse import urlsplit

from loadgen.apis import APIS
from loadgen.plan import LoadgenError, Source, Target
from loadgen.run import Plan, run
from loadgen.suites import SUITES, Custom

NAMES = "ABCDEFGH"


def main(argv: list[str]) -> int:
    """Run one command. Returns the exit status: 0, 1 when part of it failed, 2 when it was not started."""
    flags = _parser().parse_args(argv)
    try:
        plan = _plan(flags)
        return run(plan)
    except LoadgenError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def targets(
    urls: list[str], apis: list[str], models: list[str], api_key: str | None = None
) -> tuple[Target, ...]:
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
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise LoadgenError(f"{url}: a base URL is http://HOST:PORT")
    if not _is_loopback(parts.hostname):
        raise LoadgenError(f"{url}: not on this machine; a load test runs against loopback only")
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return host, parts.port or 80


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
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadgen", description=__doc__)
    parser.add_argument("suite", choices=[*SUITES, "all"])
    parser.add_argument(
        "--url", action="append", required=True, help="base URL; several are measured in turns"
    )
    parser.add_argument(
        "--api", action="append", choices=list(APIS), help="wire format (default bouquet-msgpack)"
    )
    parser.add_argument("--model", action="append", help="model name to send (default: the server's first)")
    parser.add_argument("--api-key", help="sent as Authorization: Bearer")
    parser.add_argument("--vocab-size", type=int, help="random ids are below this (default: what /info says)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", type=_numbers, metavar="N,…", help="tokens a sequence")
    parser.add_argument("--batches", type=_numbers, metavar="N,…", help="sequences a request")
    parser.add_argument("--in-flight", type=_numbers, metavar="N,…", help="requests under way")
    parser.add_argument("--processes", type=int, help="client processes")
    parser.add_argument("--requests", type=int, help="requests to measure a case")
    parser.add_argument("--duration", type=float, metavar="S", help="longest measurement of a case")
    parser.add_argument("--warmup", type=float, metavar="S", help="shortest warm-up of a case")
    parser.add_argument("--timeout", type=float, metavar="S", help="longest wait for an answer (default 60)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often each case is run on each URL, in turns"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser


def _plan(flags: argparse.Namespace) -> Plan:
    custom = Custom(
        lengths=flags.lengths,
        batches=flags.batches,
        in_flight=flags.in_flight,
        processes=flags.processes,
        requests=flags.requests,
        duration_s=flags.duration,
        warmup_s=flags.warmup,
        timeout_s=flags.timeout,
        quick=flags.quick,
    )
    names = list(SUITES) if flags.suite == "all" else [flags.suite]
    return Plan(
        targets=targets(flags.url, flags.api or ["bouquet-msgpack"], flags.model or [], flags.api_key),
        cases=tuple(case for name in names for case in SUITES[name](custom)),
        source=Source(vocab_size=flags.vocab_size or 0, seed=flags.seed),
        rounds=flags.rounds,
        json=flags.json,
    )
