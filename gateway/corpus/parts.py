"""The files of a shard: its vectors, and the rows that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet as pq

from gateway.corpus.commits import part_name, rejected_name
from gateway.corpus.options import CorpusOptions, VectorType
from gateway.corpus.plan import Shard
from gateway.corpus.rows import Rejected
from gateway.corpus.store import Store
from gateway.corpus.windows import Window
from gateway.dtypes import Dtype

# As requests call the types, and as Arrow does. Bits come eight to a byte.
DTYPES: dict[VectorType, Dtype] = {
    "float32": Dtype.FLOAT32,
    "float16": Dtype.FLOAT16,
    "int8": Dtype.INT8,
    "bits": Dtype.UBINARY,
}
_ARROW = {"float32": pa.float32(), "float16": pa.float16(), "int8": pa.int8(), "bits": pa.uint8()}
_VALUES = "vector.list.element"  # the column of a part in which the vectors' values are
_REJECTED = pa.schema(
    [("file", pa.string()), ("row", pa.int64()), ("id", pa.string()), ("reason", pa.string())]
)


# Opens what takes a shard's tables; its files are there once the block has ended well.
Opener = Callable[[Store, Shard, Any], AbstractContextManager[Any]]


def part_schema(options: CorpusOptions, dimensions: int, id_type: Any, about: dict[str, str]) -> Any:
    """file, row, id if there is one, vector. about: metadata, for whoever finds the part alone."""
    vectors = options.vectors
    width = dimensions // 8 if vectors == "bits" else dimensions
    # Fragments of one Lance table must not differ in their dictionaries.
    names = pa.string() if options.format == "lance" else pa.dictionary(pa.int32(), pa.string())
    fields = [("file", names), ("row", pa.int64())]
    if id_type is not None:
        fields.append(("id", id_type))
    fields.append(("vector", pa.list_(pa.field("element", _ARROW[vectors], nullable=False), width)))
    return pa.schema(fields, metadata=about)


class PartWriter:
    """Rows into the two files of one shard. Called from one thread at a time.

    rows: with vectors, tokens: of them, so far. rejected: rows without; about 200 bytes of memory each.
    damage: what of the input could not be read, if anything. fragments: see Outcome.
    """

    def __init__(self, writer: Any | None, schema: Any) -> None:
        """writer: takes tables; None: nobody does."""
        self._writer = writer
        self._schema = schema
        self.rows = self.tokens = 0
        self.rejected: list[Rejected] = []
        self.damage = ""

    @property
    def fragments(self) -> tuple[str, ...]:
        """Of a Lance table, once the shard's files are there."""
        return tuple(getattr(self._writer, "fragments", ()))

    def write_window(self, window: Window) -> None:
        """A window's rows with values as a row group; the others are kept until the end."""
        self.rejected += window.all_rejected()
        self.tokens += window.tokens
        self.damage = self.damage or window.damage
        places = [place for place in range(len(window.rows)) if place not in window.reasons]
        if places and window.values is not None:
            files, rows, ids = (
                [column[place] for place in places] for column in (window.files, window.rows, window.ids)
            )
            self._write(files, rows, ids, window.values[places] if window.reasons else window.values)

    def _write(self, files: list[Any], rows: list[Any], ids: list[Any], values: NDArray[Any]) -> None:
        """values: [n, width] of the schema's type."""
        self.rows += len(rows)
        if self._writer is None:
            return
        field = self._schema.field("vector").type
        flat = pa.array(np.ascontiguousarray(values).reshape(-1), field.value_type)
        columns = [pa.array(files).cast(self._schema.field("file").type), pa.array(rows, pa.int64())]
        if "id" in self._schema.names:
            columns.append(pa.array(ids, self._schema.field("id").type))
        columns.append(pa.FixedSizeListArray.from_arrays(flat, type=field))
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))


@contextmanager
def writing(store: Store, shard: Shard, schema: Any, opener: Opener) -> Iterator[PartWriter]:
    """A writer whose part is in OUT once the block has ended well; its rejected rows are there before.

    Raises:
        OutputError: OUT cannot be written.
    """
    with opener(store, shard, schema) as writer:
        part = PartWriter(writer, schema)
        yield part
        if part.rejected:
            _write_rejected(store, shard, part.rejected)
        else:
            store.delete(rejected_name(shard))


@contextmanager
def _parquet(store: Store, shard: Shard, schema: Any) -> Iterator[Any]:
    with store.writing(part_name(shard)) as stream:
        compression = dict.fromkeys(("file", "row", "id"), "zstd") | {_VALUES: "none"}
        # Parquet has no bytes: plain, int8 and bits take four each; as indices into 256 values they take one.
        by_index = ["file", _VALUES] if schema.field("vector").type.value_type.bit_width == 8 else ["file"]
        writer = pq.ParquetWriter(
            stream, schema, compression=compression, use_dictionary=by_index, write_statistics=["row", "id"]
        )
        try:
            yield writer
        except BaseException:
            writer.is_open = False  # its footer would be written to a file that is thrown away
            raise
        writer.close()


@contextmanager
def _nowhere(store: Store, shard: Shard, schema: Any) -> Iterator[None]:
    yield None


def opener_of(options: CorpusOptions) -> Opener:
    """By the job's format.

    Raises:
        CorpusError: OUT is nowhere that the format can be written.
    """
    if options.format == "lance":
        from gateway.corpus.lance_table import LanceTable

        return LanceTable(options.out).writing
    return _parquet if options.format == "parquet" else _nowhere


def _write_rejected(store: Store, shard: Shard, rows: list[Rejected]) -> None:
    columns = dict(zip(Rejected._fields, zip(*rows, strict=True), strict=True))
    with store.writing(rejected_name(shard)) as stream:
        pq.write_table(pa.table(columns, schema=_REJECTED), stream, compression="zstd")
