"""Rows that are tokenised, sorted and written together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from gateway.corpus.rows import Chunk, Rejected


@dataclass(slots=True)
class Window:
    """Rows of one shard in their order, at first with texts, in the end with values [n, width].

    reasons: why rows have no vector, by their place in the window. rejected: rows that had no text.
    """

    files: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    ids: list[object] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    damage: str = ""
    chars: int = 0
    tokens: int = 0
    reasons: dict[int, str] = field(default_factory=dict)
    values: NDArray[Any] | None = None

    def add(self, chunk: Chunk) -> None:
        """Take a chunk's rows."""
        self.files += [chunk.file] * len(chunk.rows)
        self.rows += chunk.rows
        self.ids += chunk.ids
        self.texts += chunk.texts
        self.rejected += chunk.rejected
        self.damage = self.damage or chunk.damage
        self.chars += sum(map(len, chunk.texts))

    @property
    def size(self) -> int:
        """Rows, rejected ones too."""
        return len(self.rows) + len(self.rejected)

    def all_rejected(self) -> list[Rejected]:
        """Rows that had no text, and those that gave no vector, by file and row."""
        failed = [
            Rejected(self.files[place], self.rows[place], _text(self.ids[place]), reason)
            for place, reason in self.reasons.items()
        ]
        return sorted([*self.rejected, *failed], key=lambda row: (row.file, row.row))


def _text(id_: object) -> str | None:
    return None if id_ is None else str(id_)


def next_window(chunks: Iterator[Chunk], most_rows: int, most_chars: int) -> Window | None:
    """The next chunks until there are so many rows or characters; None when there are no more."""
    window = Window()
    for chunk in chunks:
        window.add(chunk)
        if window.size >= most_rows or window.chars >= most_chars:
            break
    return window if window.size or window.damage else None
