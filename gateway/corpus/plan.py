"""The split of IN into shards: the same for the same files and limits, and kept for reruns."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import parquet as pq

from gateway.corpus.errors import OTHERWISE, RefusedError
from gateway.corpus.locations import FoundFile
from gateway.corpus.rows import Piece
from gateway.corpus.store import JOB, Store

_PLAN, _FILES = f"{JOB}/plan.parquet", f"{JOB}/files.parquet"


@dataclass(frozen=True, slots=True)
class Shard:
    """What is embedded and committed at once."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """Rows that it has, also those that will be rejected."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def name(self) -> str:
        """Of its files in OUT."""
        return f"{self.index:06d}"


def split(pieces: Iterable[Piece], most_rows: int, most_bytes: int) -> list[Shard]:
    """Pieces in their order, as many a shard as its limits allow, and one at least.

    Pieces of one file that follow one another become one.
    """
    shards: list[Shard] = []
    held: list[Piece] = []
    rows = nbytes = 0
    for piece in pieces:
        if held and (rows + piece.rows > most_rows or nbytes + piece.nbytes > most_bytes):
            shards.append(Shard(len(shards), tuple(held)))
            held, rows, nbytes = [], 0, 0
        rows, nbytes = rows + piece.rows, nbytes + piece.nbytes
        last = held[-1] if held else None
        if last is not None and (last.file, last.stop) == (piece.file, piece.start):
            held[-1] = last._replace(stop=piece.stop, nbytes=last.nbytes + piece.nbytes, damage=piece.damage)
        else:
            held.append(piece)
    return [*shards, Shard(len(shards), tuple(held))] if held else shards


def save_plan(store: Store, shards: Sequence[Shard], files: Sequence[FoundFile]) -> None:
    """Keep the split and the files that it is of; the split last, since it is what makes a job one.

    Raises:
        OutputError: see Store.write.
    """
    columns = {name: [getattr(file, name) for file in files] for name in ("path", "size", "mtime_ns")}
    _write(store, _FILES, pa.table(columns))
    rows = [(shard.index, *piece) for shard in shards for piece in shard.pieces]
    names = ("shard", *Piece._fields)
    _write(
        store, _PLAN, pa.table(dict(zip(names, zip(*rows, strict=True) if rows else [[]] * 7, strict=True)))
    )


def load_plan(store: Store) -> tuple[list[Shard], list[FoundFile]] | None:
    """What was kept, or None.

    Raises:
        RefusedError: it is damaged.
    """
    plan, files = store.read(_PLAN), store.read(_FILES)
    if plan is None or files is None:
        return None
    pieces: dict[int, list[Piece]] = {}
    try:
        for row in pq.read_table(io.BytesIO(plan)).to_pylist():
            pieces.setdefault(row.pop("shard"), []).append(Piece(**row))
        found = [FoundFile(**row) for row in pq.read_table(io.BytesIO(files)).to_pylist()]
    except (OSError, pa.ArrowException, KeyError, TypeError) as error:
        raise RefusedError(f"the plan in {store.path(JOB)} is damaged: {error}; {OTHERWISE}") from error
    return [Shard(index, tuple(held)) for index, held in pieces.items()], found


def forget_plan(store: Store) -> None:
    """The next run splits anew."""
    store.delete(_PLAN)


def _write(store: Store, name: str, table: object) -> None:
    with store.writing(name) as stream:
        pq.write_table(table, stream, compression="zstd")
