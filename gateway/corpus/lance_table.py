"""Shards as fragments of a Lance table, which is there once all of them are.

A fragment's file is named by its shard's marker and is of no table, until one commit makes a table of all.
Imported only where one is wanted.

Source: https://lance.org/guide/distributed_write
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import lance
import msgspec
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from gateway.corpus.commits import TABLE, Outcome
from gateway.corpus.errors import CorpusError, OutputError
from gateway.corpus.plan import Shard
from gateway.corpus.store import JOB, Store

_SCHEMA = f"{JOB}/schema.arrow"
# Of a file; larger than any shard.
_MOST_ROWS = 1 << 40
_OPTIONS = {"endpoint_override": "aws_endpoint", "region": "aws_region"}


class _GivenUp(Exception):  # noqa: N818
    """Ends the reading of a shard that will not be finished."""


class LanceTable:
    """The table in OUT. Everything raises OutputError where it cannot be read or written."""

    def __init__(self, url: str) -> None:
        """url: OUT. Raises CorpusError for one that Lance does not know."""
        self._uri, self._options = _place(url)
        self._schema: Any = None

    def commit(self, store: Store, outcomes: Sequence[Outcome]) -> None:
        """Make the table of these shards' fragments, in their order, and remove what is no longer of it."""
        if not outcomes:
            return
        content = store.read(_SCHEMA)
        if content is None:
            raise OutputError(f"{store.path(_SCHEMA)} is gone; give --redo to embed all of it anew")
        fragments = [FragmentMetadata.from_json(text) for outcome in outcomes for text in outcome.fragments]
        wanted = [file.path for fragment in fragments for file in fragment.files]
        with _said():
            if self._files() != wanted:
                schema = pa.ipc.read_schema(pa.py_buffer(content))
                operation = lance.LanceOperation.Overwrite(schema, fragments)
                table = lance.LanceDataset.commit(self._uri, operation, storage_options=self._options)
                table.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)

    def ids(self) -> Iterator[list[object]]:
        """Ids of all rows, some at a time."""
        with _said():
            for batch in lance.dataset(self._uri, storage_options=self._options).to_batches(columns=["id"]):
                yield batch.column("id").to_pylist()

    @contextmanager
    def writing(self, store: Store, shard: Shard, schema: Any) -> Iterator[Fragments]:
        """What takes a shard's rows; its fragments are written once the block has ended well."""
        if self._schema is None:  # for the commit, which may be another process's
            store.write(_SCHEMA, schema.serialize().to_pybytes())
            self._schema = schema
        with ThreadPoolExecutor(1, thread_name_prefix="corpus-lance") as pool, _said():
            writer = Fragments(pool, self._uri, self._options, schema)
            try:
                yield writer
            except BaseException:
                writer.give_up()
                raise
            writer.close()

    def _files(self) -> list[str] | None:
        """The data files of the table as it is; None: there is none."""
        try:
            table = lance.dataset(self._uri, storage_options=self._options)
        except ValueError:
            return None
        return [file.path for fragment in table.get_fragments() for file in fragment.data_files()]


class Fragments:
    """Tables go in, on one thread; Lance takes them out on another. fragments: as JSON, once it is closed."""

    def __init__(self, pool: ThreadPoolExecutor, uri: str, options: dict[str, str], schema: Any) -> None:
        self.fragments: list[str] = []
        self._tables: queue.Queue[Any] = queue.Queue()
        self._taken: queue.Queue[None] = queue.Queue()
        reader = pa.RecordBatchReader.from_batches(schema, self._batches())
        self._written = pool.submit(
            write_fragments,
            reader,
            uri,
            schema=schema,
            max_rows_per_file=_MOST_ROWS,
            storage_options=options,
        )
        self._written.add_done_callback(lambda _: self._taken.put(None))

    def write_table(self, table: Any) -> None:
        """Have `table` written, or on its way; so that no more than two are held."""
        self._tables.put(table)
        self._taken.get()
        if self._written.done():
            self._written.result()

    def close(self) -> None:
        """Wait until all is written."""
        self._tables.put(None)
        written = self._written.result()
        self.fragments = [msgspec.json.encode(fragment.to_json()).decode() for fragment in written]

    def give_up(self) -> None:
        """Write no more; what was written is of no table."""
        self._tables.put(_GivenUp())
        self._written.exception()

    def _batches(self) -> Iterator[Any]:
        while (table := self._tables.get()) is not None:
            if isinstance(table, _GivenUp):
                raise table
            self._taken.put(None)
            yield from table.to_batches()


@contextmanager
def _said() -> Iterator[None]:
    """Lance's errors are OSErrors and ValueErrors of many lines."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise OutputError.of(OSError(" ".join(str(error).split())), TABLE) from error


def _place(url: str) -> tuple[str, dict[str, str]]:
    """Where Lance finds the table, and its options: of S3 those that pyarrow has in the URL."""
    if "://" not in url:
        return str(Path(url).expanduser().absolute() / TABLE), {}
    parts = urlsplit(url)
    if parts.scheme not in ("file", "s3", "gs"):
        raise CorpusError(
            f"--format lance writes to a path, file://, s3:// or gs://, not to {parts.scheme}://"
        )
    query = dict(parse_qsl(parts.query))
    options = {_OPTIONS[name]: value for name, value in query.items() if name in _OPTIONS}
    if parts.scheme == "s3":
        options["aws_allow_http"] = "true"  # of an endpoint that the environment names, too
        if parts.username and parts.password:
            options["aws_access_key_id"] = unquote(parts.username)
            options["aws_secret_access_key"] = unquote(parts.password)
        if "aws_endpoint" in options and "://" not in options["aws_endpoint"]:
            options["aws_endpoint"] = f"{query.get('scheme', 'https')}://{options['aws_endpoint']}"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{TABLE}", options
