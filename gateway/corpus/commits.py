"""Which shards are done: each has a small file in OUT, written after its part."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gateway.corpus.plan import Shard
from gateway.corpus.store import JOB, Store

# In place of parts, where that is the job's format.
TABLE = "vectors.lance"
_DATA = f"{TABLE}/data"
_DONE, _REJECTED = f"{JOB}/done", f"{JOB}/rejected"
_PART = re.compile(r"part-\d{6,}\.parquet")
_READERS = 16


class Outcome(msgspec.Struct, frozen=True):
    """What became of a shard.

    rows: with a vector. rejected: without. nbytes: of its vectors' files; 0: there are none.
    run: the driver's word, by which reruns are told apart. worker: host and process that embedded it.
    damage: what of IN could not be read; such a shard has what could be, and is tried again by a rerun.
    fragments: of a Lance table, as it says of them in JSON.
    """

    shard: int
    rows: int
    rejected: int
    tokens: int
    nbytes: int
    seconds: float
    run: str
    worker: str
    damage: str = ""
    fragments: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, int]:
        """What the shard's vectors are in, and how many bytes each has."""
        if self.fragments:
            return data_files(self.fragments)
        return {_part(f"{self.shard:06d}"): self.nbytes} if self.nbytes else {}


def data_files(fragments: Sequence[str]) -> dict[str, int]:
    """The files of a Lance table's fragments, by their names in OUT, and how many bytes each has."""
    found = [file for text in fragments for file in msgspec.json.decode(text)["files"]]
    return {f"{_DATA}/{file['path']}": file["file_size_bytes"] for file in found}


def part_name(shard: Shard) -> str:
    """The shard's vectors in OUT."""
    return _part(shard.name)


def _part(name: str) -> str:
    return f"part-{name}.parquet"


def rejected_name(shard: Shard) -> str:
    """The shard's rows without vectors in OUT; there only if there are any."""
    return f"{_REJECTED}/{shard.name}.parquet"


def commit(store: Store, shard: Shard, outcome: Outcome) -> None:
    """From here on the shard is done.

    Raises:
        OutputError: see Store.write.
    """
    store.write(_marker(shard), msgspec.json.encode(outcome))


def committed(store: Store, shards: Sequence[Shard]) -> dict[int, Outcome]:
    """The shards that are done and whose files are there as they were written."""
    there = store.sizes("") | {f"{_DATA}/{name}": size for name, size in store.sizes(_DATA).items()}
    markers = store.sizes(_DONE)
    marked = [shard for shard in shards if _marker(shard).rpartition("/")[2] in markers]
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda shard: _read(store, shard, lambda name: there.get(name, 0)), marked)
        return {outcome.shard: outcome for outcome in found if outcome is not None}


def outcome_of(store: Store, shard: Shard) -> Outcome | None:
    """What became of one shard, if it is done."""
    return _read(store, shard, store.size)


def _read(store: Store, shard: Shard, size: Callable[[str], int]) -> Outcome | None:
    """size: bytes of a file, as it is now."""
    content = store.read(_marker(shard))
    if content is None:
        return None
    try:
        outcome = msgspec.json.decode(content, type=Outcome)
    except msgspec.DecodeError:
        return None
    return outcome if all(size(name) == nbytes for name, nbytes in outcome.files.items()) else None


def undo(store: Store) -> None:
    """Remove all that shards wrote; markers first, so that parts without one are all that can be left.

    Raises:
        OutputError: a file cannot be removed.
    """
    for name in store.sizes(_DONE):
        store.delete(f"{_DONE}/{name}")
    for name in filter(_PART.fullmatch, store.sizes("")):
        store.delete(name)
    store.delete_folder(TABLE)
    for name in store.sizes(_REJECTED):
        store.delete(f"{_REJECTED}/{name}")


def _marker(shard: Shard) -> str:
    return f"{_DONE}/{shard.name}.json"
