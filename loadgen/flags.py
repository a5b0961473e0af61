"""The flags of the command line, and what their values must look like."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadgen.apis import APIS
from loadgen.suites import SUITES


def parser() -> argparse.ArgumentParser:
    """Every flag of `python -m loadgen`."""
    made = argparse.ArgumentParser(
        prog="python -m loadgen",
        description="Load an embedding server on this machine and report how it did. "
        "`echo` starts a server that only answers, to see what the client itself costs.",
    )
    _add_servers(made)
    _add_inputs(made)
    _add_load(made)
    _add_bounds(made)
    _add_output(made)
    return made


def _add_servers(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add("suite", nargs="?", choices=[*SUITES, "all", "echo"])
    add("--url", action="append", help="base URL on loopback; several are measured in turns")
    add("--api", action="append", choices=list(APIS), help="wire format (default: bouquet-msgpack)")
    add("--model", action="append", help="model name to send (default: the first that the server lists)")
    add("--api-key", help="sent as Authorization: Bearer")
    add("--compare", nargs="+", type=Path, metavar="FILE", help="set result files side by side, and end")
    add("--port", type=int, default=8200, help="of `echo`; 0: any free one")


def _add_inputs(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("what is sent").add_argument
    add("--vocab-size", type=_positive, help="random ids are below this (default: what /info says)")
    add("--seed", type=int, default=0)
    add("--corpus", type=Path, help="text file or folder: send text of it instead of random ids")
    add("--tokenizer", type=Path, help="tokenizer.json that makes the lengths of texts exact")
    add("--lengths", type=_numbers, metavar="N,…", help="tokens a sequence")
    add("--batches", type=_numbers, metavar="N,…", help="sequences a request")


def _add_load(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("how").add_argument
    add("--in-flight", type=_numbers, metavar="N,…", help="requests under way in each client process")
    add("--processes", type=_positive, help="client processes")
    add("--rate", type=_above_zero, help="requests a second of `open`, and of the queries of `mixed`")
    add("--loads", type=_numbers, metavar="N,…", help="`open`: percents of the maximum (default: 10,20…120)")
    add("--max-rate", type=_above_zero, help="`open`: requests a second that are 100 %% (default: measured)")
    add("--arrivals", choices=["poisson", "constant"], help="of open loops (default: `open` runs both)")
    add("--trace", type=Path, help="`trace`: JSONL with at_s and lengths or texts")


def _add_bounds(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("how long").add_argument
    add("--requests", type=_positive, help="requests to measure a case")
    add("--duration", type=_above_zero, metavar="S", help="longest measurement of a case")
    add("--warmup", type=_above_zero, metavar="S", help="shortest warm-up of a case")
    add("--max-warmup", type=_above_zero, metavar="S", help="longest warm-up of a case (default: 20)")
    add("--timeout", type=_above_zero, metavar="S", help="longest wait for an answer (default: 60)")
    add("--rounds", type=_positive, default=1, help="how often each case runs on each URL, in turns")
    add("--quick", action="store_true", help="seconds instead of minutes: a smoke test")
    add("--budget-s", type=_above_zero, metavar="S", help="start no case that could end later; name those")
    add("--resume", action="store_true", help="keep what the report or JSON holds and measure the rest")


def _add_output(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("what comes out").add_argument
    add("--check", metavar="URL|FOLDER", help="compare vectors with a server, or transformers on a folder")
    add("--check-api", choices=list(APIS), default="bouquet-msgpack", help="wire format of --check's URL")
    add("--no-overhead", action="store_true", help="do not measure the client against an echo server first")
    add("--json", type=Path, metavar="FILE", help="write everything measured there, after each case")
    add("--report", type=Path, metavar="FOLDER", help="write JSON, Markdown, HTML, .hgrm and PNG there")
    add("--lines", action="store_true", help="a line a case on stderr, terminal or not, instead of a bar")


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
