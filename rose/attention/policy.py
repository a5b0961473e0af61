"""Which attention backend serves which batch, from a table that `python -m rose.attention.tune` measures.

A table is the measurements themselves: for a model's heads and a batch of so many tokens in so many
sequences, the microseconds of each backend. A batch is served by what was fastest, of the backends at hand,
in the measured batch most like it in tokens and in mean length (both on a logarithmic scale). The longest
length plays no part: a captured graph knows but an upper bound of it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.aot.folders import can_be_read, user_cache
from rose.attention.fa4 import SMALL, SMALL_ROWS

if TYPE_CHECKING:
    from rose.attention.base import AttentionSpec, BatchShape

log = logging.getLogger(__name__)

FORMAT = 1
# Where nothing was measured: kernels that need no table to be good, then torch's own.
PREFERENCE = ("flashinfer-fa3", "flashinfer-fa2", "fa4", "sdpa")
# All there are; those not preferred serve only where a table has them as the fastest.
KNOWN = (*PREFERENCE, SMALL, "chained", "flat", "flat-product", "flashinfer-fa3-fp8")
# The backends for models whose layers make q, k and v in e4m3.
IN_FP8 = frozenset({"flashinfer-fa3-fp8"})
# The backends that can keep a token from seeing what is more than a window away.
WINDOWED = frozenset({"sdpa"})
# Blocks of fa4.SMALL that run at once, one a multiprocessor of an H200. With more a second wave takes as long
# again: 77 µs a layer of one sequence of 768 tokens, where blocks of twice the rows take 73.
BLOCKS_AT_ONCE = 132
# Those that start programs for as many rows of every sequence as the longest one has.
GROWS_WITH_LONGEST = frozenset({"sdpa"})
USER_TABLE = "attention_policy.json"


@dataclass(frozen=True, slots=True)
class Cell:
    """Measured times of one batch. us: microseconds of all layers by backend."""

    head_dim: int
    group: int
    causal: bool
    num_tokens: int
    num_seqs: int
    us: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """Cells measured on one GPU. capability: of that GPU; others of the same one use the table too."""

    device: str
    capability: tuple[int, int]
    cells: tuple[Cell, ...]


def load_table(path: Path) -> PolicyTable:
    """Read a table.

    Raises:
        ValueError: the file is no table of this format; the message names it.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, this version reads {FORMAT}")
        major, minor = document["capability"]
        cells = tuple(_cell(entry) for entry in document["cells"])
        return PolicyTable(str(document["device"]), (int(major), int(minor)), cells)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def _cell(entry: dict[str, Any]) -> Cell:
    us = tuple((name, float(time)) for name, time in entry["us"].items())
    group = int(entry["num_heads"]) // int(entry["num_kv_heads"])
    shape = (int(entry["num_tokens"]), int(entry["num_seqs"]))
    return Cell(int(entry["head_dim"]), group, bool(entry["causal"]), *shape, us)


def load_tables(folders: Collection[Path] | None = None) -> tuple[PolicyTable, ...]:
    """All tables: the user's own first, then those that ship. A bad one is ignored with a log line."""
    own, shipped = user_cache(), sorted(Path(__file__).parent.glob("policy_*.json"))
    paths = [own / USER_TABLE, *shipped] if can_be_read(own) else shipped
    if folders is not None:
        paths = [path for folder in folders for path in sorted(folder.glob("*policy*.json"))]
    tables = []
    for path in paths:
        if not path.exists():
            continue
        try:
            tables.append(load_table(path))
        except (OSError, ValueError) as error:
            log.warning("ignored an attention policy table: %s", error)
    return tuple(tables)


def table_for(
    device: str, capability: tuple[int, int], tables: Collection[PolicyTable]
) -> PolicyTable | None:
    """The table of this very GPU, else one of the same compute capability, else None."""
    for table in tables:
        if table.device == device:
            return table
    return next((table for table in tables if table.capability == capability), None)


def fastest(
    table: PolicyTable | None, spec: AttentionSpec, shape: BatchShape, available: Collection[str]
) -> str:
    """As `choose`, from a given table."""
    if spec.window is not None:
        available = [name for name in available if name in WINDOWED]
    if not spec.fp8:
        available = [name for name in available if name not in IN_FP8]
    crowded = spec.num_heads * shape.num_tokens > BLOCKS_AT_ONCE * SMALL_ROWS
    if crowded:
        available = [name for name in available if name != SMALL]
    if not available:
        raise ValueError("no attention backend is available")
    for cell in sorted(_candidates(table, spec), key=lambda cell: _distance(cell, shape)):
        if crowded and min(cell.us, key=itemgetter(1))[0] == SMALL:
            continue  # of one wave, where more than one is asked about
        times = [(time, name) for name, time in cell.us if name in available]
        if times:
            return min(times)[1]
    ranked = [name for name in PREFERENCE if name in available]
    return ranked[0] if ranked else min(available)


def _candidates(table: PolicyTable | None, spec: AttentionSpec) -> list[Cell]:
    """Cells of the spec's head_dim, narrowed to its mask and then its group where such were measured."""
    cells = [cell for cell in table.cells if cell.head_dim == spec.head_dim] if table else []
    group = spec.num_heads // spec.num_kv_heads
    cells = [cell for cell in cells if cell.causal == spec.causal] or cells
    return [cell for cell in cells if cell.group == group] or cells


def _distance(cell: Cell, shape: BatchShape) -> float:
    """Doublings between two batches, in tokens plus in mean length."""
    tokens, seqs = max(shape.num_tokens, 1), max(shape.num_seqs, 1)
    by_tokens = math.log2(tokens / cell.num_tokens)
    by_length = math.log2((tokens / seqs) / (cell.num_tokens / cell.num_seqs))
    return abs(by_tokens) + abs(by_length)


@lru_cache(maxsize=8)
def _device_table(spec: AttentionSpec) -> PolicyTable | None:
    if spec.device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(spec.device)
    return table_for(name, torch.cuda.get_device_capability(spec.device), load_tables())


@lru_cache(maxsize=8192)
def _chosen(spec: AttentionSpec, shape: BatchShape, available: tuple[str, ...]) -> str:
    return fastest(_device_table(spec), spec, shape, available)


def choose(spec: AttentionSpec, shape: BatchShape, available: Collection[str]) -> str:
    """Name of the backend, one of `available`, for batches of `shape`. Answers are kept: some µs each.

    Raises:
        ValueError: `available` holds none that can run `spec`.
    """
    return _chosen(spec, shape, tuple(available))
