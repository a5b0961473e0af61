"""Rows of JSONL files, plain, gzip or zstd. A row is a line, a blank one too.

The file is read once before, to count its lines; of each shard's first line the place is kept, so that plain
files are read from there. Compressed ones are inflated up to it.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import orjson

from gateway.corpus.errors import CorpusError, RefusedError
from gateway.corpus.rows import CHUNK_ROWS, Chunk, Columns, Piece, lost

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 64 << 20
# Of whose first lines the names of fields are known.
_FILES_LOOKED_AT = 100
_MARK = b"\xef\xbb\xbf"
_CODECS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".zst": zstd.ZstdFile,
}
SUFFIXES = tuple(kind + codec for kind in (".jsonl", ".ndjson") for codec in ("", *_CODECS))


class _DamagedError(OSError):
    """The file ends early, or is not what its name says; reading it again does not help."""


def jsonl_pieces(filesystem: Any, path: str, most_rows: int, most_bytes: int) -> list[Piece]:
    """The file's rows in pieces of at most so many, or of the first line behind so many bytes.

    Raises:
        RefusedError: it cannot be opened or read.
    """
    pieces: list[Piece] = []
    start = row = offset = place = 0
    damage, ended = "", True

    def cut() -> None:
        nonlocal start, offset
        pieces.append(Piece(path, start, row, offset, place - offset))
        start, offset = row, place

    try:
        for block in _blocks(filesystem, path, 0):
            base, ended = place, block.endswith(b"\n")
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
            while len(ends):
                by_rows = most_rows - (row - start)
                by_bytes = int(np.searchsorted(ends, offset + most_bytes - base)) + 1
                taken = min(by_rows, by_bytes, len(ends))
                row, place = row + taken, base + int(ends[taken - 1])
                ends = ends[taken:]
                if taken == min(by_rows, by_bytes):
                    cut()
            place = base + len(block)
    except _DamagedError as error:
        damage = f"the file ends early: {' '.join(str(error).split())}"
    except OSError as error:
        raise RefusedError.unread(path, error) from error
    row += not ended
    if row > start or damage:
        cut()
        pieces[-1] = pieces[-1]._replace(damage=damage)
    return pieces


def check_fields(filesystem: Any, paths: Iterable[str], columns: Columns) -> None:
    """Refuse files of which no row has a field, as far as their first lines tell: its name must be wrong.

    Raises:
        CorpusError: see above; the message has the fields that there are.
        RefusedError: a file cannot be opened or read.
    """
    missing = dict.fromkeys(filter(None, columns))
    found: dict[str, None] = {}
    for path in islice(paths, _FILES_LOOKED_AT):
        for fields in _first_objects(filesystem, path):
            found.update(dict.fromkeys(fields))
            missing = {name: None for name in missing if name not in fields}
            if not missing:
                return
    if found:
        have = ", ".join(list(found)[:20])
        raise CorpusError(
            f"no line of IN has a field {next(iter(missing))!r}, as far as was read; they have {have}"
        )


def _first_objects(filesystem: Any, path: str) -> Iterator[dict[str, Any]]:
    try:
        block = next(_blocks(filesystem, path, 0), b"")
    except _DamagedError:
        return
    except OSError as error:
        raise RefusedError.unread(path, error) from error
    for line in block.removeprefix(_MARK).split(b"\n")[:CHUNK_ROWS]:
        with suppress(orjson.JSONDecodeError):
            fields = orjson.loads(line)
            if isinstance(fields, dict):
                yield fields


def read_jsonl(filesystem: Any, piece: Piece, columns: Columns) -> Iterator[Chunk]:
    """The piece's rows; lines that hold no such object are rejected with the reason."""
    if piece.start == piece.stop:  # it is there for its damage alone
        return
    chunk, row = Chunk(piece.file), piece.start
    reason = "the file has fewer lines now"
    try:
        for line in _lines(filesystem, piece):
            _add(chunk, row, line, columns)
            row += 1
            if row == piece.stop or len(chunk.rows) + len(chunk.rejected) == CHUNK_ROWS:
                yield chunk
                chunk = Chunk(piece.file)
            if row == piece.stop:
                return
    except OSError as error:
        reason = f"the line cannot be read: {' '.join(str(error).split())}"
    yield chunk
    if row < piece.stop:
        yield from lost(piece.file, row, piece.stop, reason)


def _add(chunk: Chunk, row: int, line: bytes | None, columns: Columns) -> None:
    if line is None:
        chunk.reject(row, None, f"the line is longer than {_MAX_LINE_BYTES} bytes")
        return
    try:
        fields = orjson.loads(line.removeprefix(_MARK) if row == 0 else line)
    except orjson.JSONDecodeError as error:
        chunk.reject(row, None, f"not JSON: {error}" if line.strip() else "the line is blank")
        return
    if not isinstance(fields, dict):
        chunk.reject(row, None, f"the line is a {type(fields).__name__}, not an object")
        return
    id_ = None if columns.id is None else fields.get(columns.id)
    if columns.text not in fields:
        chunk.reject(row, id_, f"no field {columns.text!r}")
    elif id_ is not None and (isinstance(id_, bool) or not isinstance(id_, int | str)):
        chunk.reject(row, id_, f"id is of type {type(id_).__name__}, not an integer or a string")
    else:
        chunk.add(row, None if id_ is None else str(id_), fields[columns.text])


def _lines(filesystem: Any, piece: Piece) -> Iterator[bytes | None]:
    """The lines from the piece's first on, without their ends; None for one that is too long to hold."""
    rest, too_long = b"", False
    for block in _blocks(filesystem, piece.file, piece.offset):
        first, *others = block.split(b"\n")
        rest += first
        if len(rest) > _MAX_LINE_BYTES:
            rest, too_long = b"", True
        for line in others:
            yield None if too_long else rest
            rest, too_long = line, False
    if rest or too_long:
        yield None if too_long else rest


def _blocks(filesystem: Any, path: str, offset: int) -> Iterator[bytes]:
    """The inflated file from `offset` on, in blocks.

    Raises:
        OSError: the rest cannot be read or, as _DamagedError, inflated; all before it has been given.
    """
    opened = next((opened for suffix, opened in _CODECS.items() if path.lower().endswith(suffix)), None)
    if opened is None:
        with filesystem.open_input_file(path) as stream:
            stream.seek(offset)
            while block := stream.read(_BLOCK_BYTES):
                yield block
        return
    with filesystem.open_input_stream(path, compression=None) as stream:
        yield from _inflated(opened(stream), offset)


def _inflated(stream: Any, offset: int) -> Iterator[bytes]:
    try:
        # Whole blocks would be lost with an error inside them; this gives what there is before it.
        while block := stream.read1(_BLOCK_BYTES):
            if offset < len(block):
                yield block[offset:]
            offset = max(0, offset - len(block))
    except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
        raise _DamagedError(str(error)) from error
