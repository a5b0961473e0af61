"""How often ids come again, in bounded memory: their hashes are compared, some of all at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import ceil

import numpy as np
from numpy.typing import NDArray
from pyarrow import parquet as pq

from gateway.corpus.commits import part_name
from gateway.corpus.errors import OutputError
from gateway.corpus.inputs import Inputs, read_pieces
from gateway.corpus.parquet_input import UNREADABLE
from gateway.corpus.plan import Shard
from gateway.corpus.rows import Columns, Piece
from gateway.corpus.store import Store

UInt64 = NDArray[np.uint64]
# Hashes in memory at once, 8 bytes each and as many again to sort them.
_MOST_HASHES = 1 << 26


def count_duplicates(hashes: Callable[[], Iterator[UInt64]], rows: int, most: int = _MOST_HASHES) -> int:
    """Of so many rows, those whose id came before; null is no id.

    hashes: gives the hashes of all ids, in blocks, each time it is called. 64 bits: of a billion ids two
    different ones are taken for the same with a chance of 3 %.
    """
    passes = max(1, ceil(rows / most))
    duplicates = 0
    for number in range(passes):
        blocks = [block[block % np.uint64(passes) == number] for block in hashes()]
        found = np.sort(np.concatenate(blocks)) if blocks else np.empty(0, np.uint64)
        duplicates += int((found[1:] == found[:-1]).sum())
    return duplicates


def in_parts(store: Store, shards: Sequence[Shard]) -> Iterator[UInt64]:
    """Hashes of the ids that have a vector, a block a shard.

    Raises:
        OutputError: a part is damaged.
    """
    for shard in shards:
        path = store.path(part_name(shard))
        try:
            ids = pq.read_table(path, columns=["id"], filesystem=store.filesystem).column("id")
        except UNREADABLE as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise OutputError(f"{path} is damaged: {why}; remove it, and run this again") from error
        yield _hashes(ids.to_pylist())


def in_table(blocks: Iterable[Sequence[object]]) -> Iterator[UInt64]:
    """Hashes of a table's ids, a block some rows."""
    return map(_hashes, blocks)


def in_inputs(inputs: Inputs, pieces: Sequence[Piece], columns: Columns) -> Iterator[UInt64]:
    """Hashes of the ids of IN's rows that have a text, a block some rows."""
    for chunk in read_pieces(inputs.filesystem, pieces, columns):
        yield _hashes(chunk.ids)


def _hashes(ids: Sequence[object]) -> UInt64:
    digests = b"".join(blake2b(str(id_).encode(), digest_size=8).digest() for id_ in ids if id_ is not None)
    return np.frombuffer(digests, np.uint64)
