"""What a job is of, kept in OUT: a rerun goes on only with the same model, columns, types and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gateway.corpus.errors import OTHERWISE, RefusedError
from gateway.corpus.locations import FoundFile
from gateway.corpus.options import CorpusOptions, ModelSource
from gateway.corpus.store import JOB, Store
from rose.batch import EngineInfo

_JOB, _ENGINE = f"{JOB}/job.json", f"{JOB}/engine.json"
# What decides the vectors and the split. Where files lie, and how many rows are held, does not.
_DECIDING = (
    "text_column",
    "id_column",
    "vectors",
    "format",
    "qdrant",
    "dimensions",
    "normalize",
    "input_type",
    "prompt_name",
    "prompt",
    "truncate",
    "shard_rows",
    "shard_bytes",
)
# What a manifest has that was written when there was no choice.
_UNNAMED = {"format": "parquet"}


def job_of(options: CorpusOptions, model: ModelSource, version: str) -> dict[str, Any]:
    """The manifest. `model` and `version` are there to be read; only the rest is compared."""
    deciding = {name: getattr(options, name) for name in _DECIDING}
    deciding["qdrant"] = None if options.qdrant is None else options.qdrant.collection
    return {
        "version": version,
        "model": model.name,
        "weights": model.digest,
        "dtype": model.dtype,
        **deciding,
    }


def load_job(store: Store) -> dict[str, Any] | None:
    """The manifest of the job in OUT, if there is one.

    Raises:
        RefusedError: it is damaged.
    """
    content = store.read(_JOB)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise RefusedError(f"{store.path(_JOB)} is damaged: {error}; {OTHERWISE}") from error


def save_job(store: Store, job: dict[str, Any]) -> None:
    """Keep the manifest.

    Raises:
        OutputError: see Store.write.
    """
    store.write(_JOB, msgspec.json.format(msgspec.json.encode(job)))


def forget_job(store: Store) -> None:
    """As if no job had been here."""
    store.delete(_JOB)
    store.delete(_ENGINE)


def changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs between two manifests, in words."""
    if before.get("weights") != now["weights"]:
        yield "model was {model} ({weights})".format(**before) + ", is {model} ({weights})".format(**now)
    for name in ("dtype", *_DECIDING):
        was = before.get(name, _UNNAMED.get(name))
        if was != now[name]:
            yield f"{name} was {_shown(was)}, is {_shown(now[name])}"


def file_changes(before: Sequence[FoundFile], now: Sequence[FoundFile]) -> Iterator[str]:
    """What differs between two lists of files, in words: the first three, then how many more."""
    old, new = {file.path: file for file in before}, {file.path: file for file in now}
    found = [f"{path} is gone" for path in old.keys() - new.keys()]
    found += [f"{path} is new" for path in new.keys() - old.keys()]
    found += [f"{path} was written again" for path in old.keys() & new.keys() if old[path] != new[path]]
    yield from sorted(found)[:3]
    if len(found) > 3:
        yield f"{len(found) - 3} more files differ"


def check_engine(store: Store, info: EngineInfo) -> None:
    """Refuse to go on with arithmetic of another dtype, as "auto" would on another device.

    Raises:
        RefusedError: see above.
        OutputError: see Store.write.
    """
    content = store.read(_ENGINE)
    if content is None:
        store.write(_ENGINE, msgspec.json.encode({"dtype": info.dtype}))
        return
    try:
        dtype = msgspec.json.decode(content, type=dict[str, str])["dtype"]
    except (msgspec.DecodeError, KeyError) as error:
        raise RefusedError(f"{store.path(_ENGINE)} is damaged: {error}; {OTHERWISE}") from error
    if dtype != info.dtype:
        raise RefusedError(
            f"{store.url} was begun in {dtype} and this engine computes in {info.dtype}; give --dtype"
            f" {dtype}, or --redo for all anew"
        )


def _shown(value: object) -> str:
    return "not given" if value is None else repr(value)
