"""Corpus jobs over a scripted engine, and what they leave in OUT."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

from gateway.corpus.driver import run_job
from gateway.corpus.local import run_here
from gateway.corpus.locations import locate
from gateway.corpus.options import CorpusOptions, LoadedModel, ModelSource
from gateway.corpus.store import Store
from gateway.corpus.summary import Summary
from rose.batch import EngineInfo
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info, fake_vector
from tests.http.served import byte_tokenizer

TOKENIZER = byte_tokenizer()


def fake_model(engine: FakeEngine | None = None, *, digest: str = "d1", dtype: str = "auto") -> ModelSource:
    """A model whose vectors are hashes of a text's bytes."""
    loaded = LoadedModel(engine or FakeEngine(), TOKENIZER, digest, SchedulerOptions())
    return ModelSource("fake", digest, dtype, lambda: loaded)


def embed(
    source: Path | str, out: Path | str, model: ModelSource | None = None, **options: Any
) -> tuple[Summary, int]:
    """Run a job in this process; what became of it, and its exit status."""
    given = CorpusOptions(str(source), str(out), **options)
    return run_job(given, model or fake_model(), "test", run_here, 1)


def expected(text: str, info: EngineInfo | None = None) -> np.ndarray:
    """f32[D]: the vector of `text`, normalised as the fake model says."""
    info = info or fake_info()
    vector = fake_vector(TOKENIZER.encode([text])[0], info.dimensions)
    return vector / np.linalg.norm(vector)


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any] | pa.Array], **options: Any) -> Path:
    """A parquet file of these columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def write_texts(path: Path, count: int, *, first: int = 0, **options: Any) -> Path:
    """A parquet file of `count` rows: ids from `first` on, and short texts of various lengths."""
    ids = list(range(first, first + count))
    return write_parquet(path, {"id": ids, "text": [text_of(id_) for id_ in ids]}, **options)


def text_of(id_: int) -> str:
    """What the row with this id says."""
    return f"row {id_} " + "x" * (id_ * 37 % 101)


def parts(out: Path | str) -> pa.Table:
    """All rows of OUT, as any reader of datasets finds them."""
    place = locate(str(out))
    return pq.read_table(place.path, filesystem=place.filesystem)


def rows(out: Path | str) -> list[dict[str, Any]]:
    """The same as Python values, by file and row."""
    found: list[dict[str, Any]] = parts(out).to_pylist()
    return sorted(found, key=lambda row: (row["file"], row["row"]))


def rejected(out: Path) -> list[dict[str, Any]]:
    """All rejected rows, by shard."""
    folder = out / "_corpus" / "rejected"
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def markers(out: Path | str) -> dict[int, dict[str, Any]]:
    """What OUT says of each shard that is done."""
    store = Store(str(out))
    found = [json.loads(store.read(f"_corpus/done/{name}") or b"") for name in store.sizes("_corpus/done")]
    return {marker["shard"]: marker for marker in found}


def leftovers(out: Path | str) -> list[str]:
    """Files that are half written."""
    return list(Store(str(out)).sizes("_corpus/tmp"))


def unmarked(out: Path | str) -> list[str]:
    """Parts without a marker, or of another size than theirs says."""
    wanted = {f"part-{index:06d}.parquet": marker["nbytes"] for index, marker in markers(out).items()}
    return [name for name, size in Store(str(out)).sizes("").items() if size != wanted.get(name)]


def check_complete(out: Path | str, count: int) -> None:
    """Ids 0 to count - 1 are there once each, each with its own vector."""
    found = rows(out)
    assert sorted(row["id"] for row in found) == list(range(count))
    vectors = np.array([row["vector"] for row in found], np.float32)
    wanted = np.array([expected(text_of(row["id"])) for row in found], np.float32)
    np.testing.assert_allclose(vectors, wanted, atol=1e-6)
