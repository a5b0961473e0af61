"""Recorded traffic: a JSON object a line, `{"at_s": 0.25, "lengths": [12, 480]}` or with `"texts": […]`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from loadgen.plan import LoadgenError, Source
from loadgen.workload import Inputs, random_ids

MAX_TOKENS = 100_000_000


class Entry(msgspec.Struct, frozen=True):
    """One request. at_s: seconds after the first one of the file. lengths: tokens of each sequence."""

    at_s: float
    lengths: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


def read(path: Path) -> list[Entry]:
    """The requests of a trace in the order of their times.

    Raises:
        LoadgenError: a line is no request; the message has its number.
    """
    entries = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LoadgenError(f"--trace: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except msgspec.DecodeError as error:
            raise LoadgenError(f"{path}, line {number}: {error}") from error
        if bool(entry.lengths) == bool(entry.texts) or min(entry.lengths, default=1) < 1 or entry.at_s < 0:
            raise LoadgenError(f"{path}, line {number}: wants at_s >= 0 and either lengths >= 1 or texts")
        entries.append(entry)
    if not entries:
        raise LoadgenError(f"{path}: no request in it")
    if sum(sum(entry.lengths) for entry in entries) > MAX_TOKENS:
        raise LoadgenError(f"{path}: more than {MAX_TOKENS} tokens")
    return sorted(entries, key=lambda entry: entry.at_s)


def inputs_of(entry: Entry, source: Source, rng: np.random.Generator) -> Inputs:
    """What one request embeds: its texts, or random ids of its lengths."""
    if entry.texts:
        return Inputs(texts=entry.texts)
    return Inputs(random_ids(entry.lengths, source, rng), tokens=sum(entry.lengths))
