"""What is read: rows with their place, and rows that cannot be embedded with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Rows that are read, or given up, at once.
CHUNK_ROWS = 1024


class Piece(NamedTuple):
    """Rows [start, stop) of a file. offset: where the first begins, in bytes of inflated text; 0 of parquet.

    nbytes: about what they take. damage: why rows behind the last cannot even be counted; "": they can.
    """

    file: str
    start: int
    stop: int
    offset: int = 0
    nbytes: int = 0
    damage: str = ""

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start


class Rejected(NamedTuple):
    """A row without a vector. id: as text; None: it has none, or it cannot be read."""

    file: str
    row: int
    id: str | None
    reason: str


class Columns(NamedTuple):
    """The names of the columns, or fields, that are read. id: None: none is."""

    text: str
    id: str | None


@dataclass(slots=True)
class Chunk:
    """Some rows of one file, in order: place, id and text of each. damage: what could not be read, if so."""

    file: str
    rows: list[int] = field(default_factory=list)
    ids: list[object] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    damage: str = ""

    def add(self, row: int, id_: object, text: object) -> None:
        """A row with what its text column holds."""
        if isinstance(text, str) and text:
            self.rows.append(row)
            self.ids.append(id_)
            self.texts.append(text)
        else:
            self.reject(row, id_, _reason(text))

    def reject(self, row: int, id_: object, reason: str) -> None:
        """A row that has no text."""
        self.rejected.append(Rejected(self.file, row, None if id_ is None else str(id_), reason))


def _reason(text: object) -> str:
    if text is None:
        return "text is null"
    return "text is empty" if text == "" else f"text is of type {type(text).__name__}, not a string"


def lost(file: str, start: int, stop: int, reason: str) -> Iterator[Chunk]:
    """All rows [start, stop) rejected, since nothing of them can be read."""
    for first in range(start, max(stop, start + 1), CHUNK_ROWS):
        chunk = Chunk(file, damage=reason)
        for row in range(first, min(first + CHUNK_ROWS, stop)):
            chunk.reject(row, None, reason)
        yield chunk
