"""Which shards are done: each has a small file in OUT, written after its part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gateway.corpus.plan import Shard
from gateway.corpus.store import JOB, Store

_DONE, _REJECTED = f"{JOB}/done", f"{JOB}/rejected"
_PART = re.compile(r"part-\d{6,}\.parquet")
_READERS = 16


class Outcome(msgspec.Struct, frozen=True):
    """What became of a shard.

    rows: with a vector. rejected: without. nbytes: of the part; 0: there is none, as the job's format is.
    run: the driver's word, by which reruns are told apart. worker: host and process that embedded it.
    damage: what of IN could not be read; such a shard has what could be, and is tried again by a rerun.
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


def part_name(shard: Shard) -> str:
    """The shard's vectors in OUT."""
    return f"part-{shard.name}.parquet"


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
    """The shards that are done and whose part is there as it was written."""
    parts, markers = store.sizes(""), store.sizes(_DONE)
    marked = [shard for shard in shards if _marker(shard).rpartition("/")[2] in markers]
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda shard: _read(store, shard, parts.get(part_name(shard), 0)), marked)
        return {outcome.shard: outcome for outcome in found if outcome is not None}


def outcome_of(store: Store, shard: Shard) -> Outcome | None:
    """What became of one shard, if it is done."""
    return _read(store, shard, store.size(part_name(shard)))


def _read(store: Store, shard: Shard, nbytes: int) -> Outcome | None:
    """nbytes: of the part, as it is now."""
    content = store.read(_marker(shard))
    if content is None:
        return None
    try:
        outcome = msgspec.json.decode(content, type=Outcome)
    except msgspec.DecodeError:
        return None
    return outcome if outcome.nbytes == nbytes else None


def undo(store: Store) -> None:
    """Remove all that shards wrote; markers first, so that parts without one are all that can be left.

    Raises:
        OutputError: a file cannot be removed.
    """
    for name in store.sizes(_DONE):
        store.delete(f"{_DONE}/{name}")
    for name in filter(_PART.fullmatch, store.sizes("")):
        store.delete(name)
    for name in store.sizes(_REJECTED):
        store.delete(f"{_REJECTED}/{name}")


def _marker(shard: Shard) -> str:
    return f"{_DONE}/{shard.name}.json"
