"""Tables of measured choices: JSON that a tuner writes and a server reads, one choice a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    rows = ",\n  ".join(json.dumps(choice) for choice in choices)
    path.write_text(f'{{\n "device": {json.dumps(device)},\n "choices": [\n  {rows}\n ]\n}}\n', "utf-8")


def say(line: str) -> None:
    """A line of a tuner's progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
