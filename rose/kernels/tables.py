"""Tables of measured choices: JSON that a tuner writes and a server reads, one choice a line."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rose.aot.folders import can_be_read, user_cache

log = logging.getLogger(__name__)

Table = TypeVar("Table")


def users_own(shipped: Path) -> Path:
    """Where a tuner writes, and a server looks before it takes the table that ships."""
    return user_cache() / shipped.name


def in_use(shipped: Path, read: Callable[[Path], Table]) -> Table:
    """What `read` makes of the user's own table; of the shipped one if there is none, or a bad one (logged).

    Raises:
        Exception: what `read` raises for the shipped one.
    """
    own = users_own(shipped)
    try:
        if can_be_read(own.parent) and own.exists():
            return read(own)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("ignored the table %s: %s: %s", own, type(error).__name__, error)
    return read(shipped)


def read_choices(path: Path) -> list[dict[str, Any]]:
    """The choices of a table, in the order of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON.
        KeyError: it is no table.
    """
    choices: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["choices"]
    return choices


def write_choices(path: Path, device: str, choices: Sequence[dict[str, object]]) -> None:
    """Write a table measured on `device`, a choice a line, so that differences of two tables can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(choice) for choice in choices)
    path.write_text(f'{{\n "device": {json.dumps(device)},\n "choices": [\n  {rows}\n ]\n}}\n', "utf-8")


def tuner_parser(
    module: str, description: str | None, table: Path, budget_s: float
) -> argparse.ArgumentParser:
    """Flags of `python -m module`, which measures until a time is over and writes a table like `table`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--out",
        type=Path,
        default=users_own(table),
        help="the JSON file to write; a server reads the default, %(default)s, before what ships",
    )
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help="stop measuring after this many seconds"
    )
    return parser


def say(line: str) -> None:
    """A line of a tuner's progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
