"""IN: which files, of which kind, with how many rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from gateway.corpus.errors import CorpusError
from gateway.corpus.jsonl_input import SUFFIXES, check_fields, jsonl_pieces, read_jsonl
from gateway.corpus.locations import FoundFile, Location, find, locate, shown, split_pattern
from gateway.corpus.parquet_input import id_type_of, parquet_pieces, read_parquet
from gateway.corpus.rows import Chunk, Columns, Piece
from gateway.corpus.store import Store

_PARQUET = ".parquet"
# Footers, or files of lines, that are read at once.
_READERS = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files of IN and the filesystem that they are on. others: files that are of no kind that is read."""

    filesystem: Any
    files: list[FoundFile]
    others: int = 0

    def pieces(self, columns: Columns, most_rows: int, most_bytes: int) -> list[Piece]:
        """All rows, file after file, in pieces that are no larger than a shard.

        Raises:
            CorpusError: a file has no such columns.
            RefusedError: a file cannot be opened or read.
        """
        lines = (file.path for file in self.files if not _is_parquet(file.path))
        check_fields(self.filesystem, lines, columns)

        def read(file: FoundFile) -> list[Piece]:
            if _is_parquet(file.path):
                return parquet_pieces(self.filesystem, file.path, columns, most_rows)
            return jsonl_pieces(self.filesystem, file.path, most_rows, most_bytes)

        with ThreadPoolExecutor(_READERS) as pool:
            return [piece for pieces in pool.map(read, self.files) for piece in pieces]

    def id_type(self, columns: Columns) -> Any:
        """The pyarrow type of ids in OUT: the one of parquet files, string of JSONL. None: there are none.

        Raises:
            CorpusError: files differ.
            RefusedError: a file cannot be opened or read.
        """
        if columns.id is None:
            return None
        found: dict[Any, str] = {}
        for file in self.files:
            parquet = _is_parquet(file.path)
            kind = id_type_of(self.filesystem, file.path, columns.id) if parquet else pa.string()
            found.setdefault(kind, file.path)
        found.pop(None, None)
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise CorpusError(f"ids are {one} in {first} and {other} in {second}; they must be of one type")
        return next(iter(found), pa.string())


def find_inputs(url: str, out: Store) -> Inputs:
    """The files that a path, folder, pattern or URL names, but for those below OUT.

    Raises:
        CorpusError: there are none of a kind that is read.
    """
    place, found = find(url)
    below = _below(out, place)
    outside = [file for file in found if not below(file.path)]
    if not outside:
        raise CorpusError(f"{shown(url)} is below OUT, {out.url}, whose files are not read; give another OUT")
    known = [file for file in outside if file.path.lower().endswith((_PARQUET, *SUFFIXES))]
    if not known:
        kinds = ", ".join((_PARQUET, *SUFFIXES))
        raise CorpusError(f"{shown(url)} has no files of the kinds that are read: {kinds}")
    return Inputs(place.filesystem, known, len(outside) - len(known))


def _below(out: Store, place: Location) -> Callable[[str], bool]:
    """What tells whether a file of IN's place is below OUT; on this machine by whatever way it is named."""
    if not (out.local and place.local):
        return lambda path: path.startswith(f"{out.root}/")
    root = Path(out.root).resolve()
    folder_below = cache(lambda folder: Path(folder).resolve().is_relative_to(root))
    return lambda path: folder_below(path.rpartition("/")[0] or "/")


def source_filesystem(url: str) -> Any:
    """The filesystem of IN, for a worker that has the plan."""
    return locate(split_pattern(url)[0]).filesystem


def read_pieces(filesystem: Any, pieces: Sequence[Piece], columns: Columns) -> Iterator[Chunk]:
    """The rows of all pieces, in order; every one comes, with its text or as rejected."""
    for piece in pieces:
        read = read_parquet if _is_parquet(piece.file) else read_jsonl
        yield from read(filesystem, piece, columns)


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(_PARQUET)
