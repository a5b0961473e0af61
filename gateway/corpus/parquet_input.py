"""Rows of parquet files. A row group that cannot be read costs its own rows and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq
from pyarrow import types

from gateway.corpus.errors import CorpusError, RefusedError
from gateway.corpus.rows import CHUNK_ROWS, Chunk, Columns, Piece, lost

# Bytes of text that are decoded at once, about: rows of megabytes come a few at a time.
_CHUNK_BYTES = 4 << 20
# Of a file's end, read at once: most footers are no longer.
_END_BYTES = 64 << 10
# What damaged files raise: pyarrow's own errors are of these.
UNREADABLE = (OSError, pa.ArrowException, ValueError)


def parquet_pieces(filesystem: Any, path: str, columns: Columns, most_rows: int) -> list[Piece]:
    """The file's rows in pieces of at most so many, cut at row groups where these are no larger.

    Raises:
        CorpusError: a column is missing, or is not one of text or ids.
        RefusedError: the file cannot be opened or read.
    """
    end = _end(filesystem, path)
    try:
        file = pq.ParquetFile(pa.BufferReader(end))
        schema, metadata = file.schema_arrow, file.metadata
    except UNREADABLE as error:
        return [Piece(path, 0, 0, damage=f"the file cannot be read: {_line(error)}")]
    check_columns(schema, columns, path)
    pieces: list[Piece] = []
    row = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        # Of all columns: pyarrow aborts the process when it is asked for one column of a damaged footer.
        nbytes = group.total_byte_size
        for start in range(row, row + group.num_rows, most_rows):
            stop = min(start + most_rows, row + group.num_rows)
            pieces.append(Piece(path, start, stop, 0, nbytes * (stop - start) // group.num_rows))
        row += group.num_rows
    return pieces


def id_type_of(filesystem: Any, path: str, column: str) -> Any:
    """The type of ids in OUT by a file's column, as `id_type`; None also of a damaged file.

    Raises:
        RefusedError: the file cannot be opened or read.
    """
    end = _end(filesystem, path)
    try:
        return id_type(pq.ParquetFile(pa.BufferReader(end)).schema_arrow.field(column).type)
    except UNREADABLE:
        return None


def _end(filesystem: Any, path: str) -> bytes:
    """The file's end with its footer. Read apart: what pyarrow raises of a damaged one is an OSError, too.

    Raises:
        RefusedError: it cannot be opened or read.
    """
    try:
        with filesystem.open_input_file(path) as stream:
            size = stream.size()
            end: bytes = stream.read_at(min(size, _END_BYTES), max(0, size - _END_BYTES))
            footer = int.from_bytes(end[-8:-4], "little") + 8  # its length and the mark are behind it
            if len(end) < footer <= size:
                end = stream.read_at(footer, size - footer)
            return end
    except UNREADABLE as error:
        raise RefusedError.unread(path, error) from error


def check_columns(schema: Any, columns: Columns, path: str) -> None:
    """Refuse a file without the columns.

    Raises:
        CorpusError: see above; the message has the columns that there are.
    """
    for name in filter(None, columns):
        if name not in schema.names:
            raise CorpusError(f"{path} has no column {name!r}; it has {', '.join(schema.names)}")
        if schema.names.count(name) > 1:
            raise CorpusError(f"{path} has {schema.names.count(name)} columns {name!r}; one is wanted")
    if not is_text(schema.field(columns.text).type):
        found = schema.field(columns.text).type
        raise CorpusError(f"{path}: column {columns.text!r} is {found}; it must hold strings")
    found = pa.null() if columns.id is None else schema.field(columns.id).type
    if id_type(found) is None and not types.is_null(found):
        raise CorpusError(f"{path}: column {columns.id!r} is {found}; ids are integers or strings")


def is_text(found: Any) -> bool:
    """Whether a type is one of strings, plain or by dictionary; or of nulls alone, as without rows."""
    if types.is_dictionary(found):
        return is_text(found.value_type)
    kinds = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    return any(kind(found) for kind in kinds)


def id_type(found: Any) -> Any:
    """The type of ids in OUT: int64 or uint64 of integers, string of strings; None of all else, nulls too."""
    if types.is_integer(found):
        return pa.uint64() if types.is_uint64(found) else pa.int64()
    return pa.string() if is_text(found) and not types.is_null(found) else None


def read_parquet(filesystem: Any, piece: Piece, columns: Columns) -> Iterator[Chunk]:
    """The piece's rows; those that cannot be read are rejected with the reason."""
    at = piece.start
    try:
        with filesystem.open_input_file(piece.file) as stream:
            file = pq.ParquetFile(stream, page_checksum_verification=True, buffer_size=1 << 20)
            first = 0
            for number in range(file.metadata.num_row_groups):
                stop = first + file.metadata.row_group(number).num_rows
                if stop > at and first < piece.stop:
                    yield from _group(file, (number, first), (at, min(stop, piece.stop)), piece, columns)
                    at = min(stop, piece.stop)
                first = stop
    except UNREADABLE as error:
        yield from lost(piece.file, at, piece.stop, f"the file cannot be read: {_line(error)}")
        return
    if at < piece.stop:
        yield from lost(piece.file, at, piece.stop, f"the file has {at} rows now")


def _group(
    file: Any, group: tuple[int, int], wanted: tuple[int, int], piece: Piece, columns: Columns
) -> Iterator[Chunk]:
    """Rows [wanted) of the row group with this number and first row."""
    number, row = group
    at, stop = wanted
    names = [name for name in columns if name is not None]
    try:
        batches = file.iter_batches(_batch_rows(file, number), row_groups=[number], columns=names)
        for batch in batches:
            skip = min(max(at - row, 0), batch.num_rows)
            part = batch.slice(skip, min(batch.num_rows, stop - row) - skip)
            if part.num_rows > 0:
                yield _chunk(part, at, piece.file, columns)
                at += part.num_rows
            row += batch.num_rows
            if row >= stop:
                return
        reason = f"row group {number} ends early"
    except UNREADABLE as error:
        reason = f"row group {number} cannot be read: {_line(error)}"
    yield from lost(piece.file, at, stop, reason)


def _batch_rows(file: Any, number: int) -> int:
    group = file.metadata.row_group(number)
    row_bytes: int = group.total_byte_size // max(group.num_rows, 1)
    return max(1, min(CHUNK_ROWS, _CHUNK_BYTES // max(row_bytes, 1)))


def _chunk(batch: Any, first_row: int, path: str, columns: Columns) -> Chunk:
    chunk = Chunk(path)
    texts = _values(batch.column(columns.text))
    ids = [None] * len(texts) if columns.id is None else _values(batch.column(columns.id))
    for row, (id_, text) in enumerate(zip(ids, texts, strict=True), first_row):
        if isinstance(id_, bytes):
            chunk.reject(row, None, "id is not UTF-8")
        elif isinstance(text, bytes):
            chunk.reject(row, id_, "text is not UTF-8")
        else:
            chunk.add(row, id_, text)
    return chunk


def _values(column: Any) -> list[Any]:
    """The column as Python has it; strings that are not UTF-8 as bytes."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]
    return values


def _decoded(value: bytes | None) -> str | bytes | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
