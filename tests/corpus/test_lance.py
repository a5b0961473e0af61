"""Corpora as Lance tables: shards are fragments, and the table is there once all of them are."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.corpus import lock
from gateway.corpus.errors import CorpusError, RefusedError
from rose.errors import EngineDeadError
from tests.corpus.jobs import embed, expected, fake_model, markers, text_of, write_parquet, write_texts
from tests.corpus.processes import CorpusProcess, run
from tests.corpus.s3_server import put, s3_server
from tests.fakes import FakeEngine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ROWS, SHARDS = 200, 10
SETTINGS: dict[str, Any] = {"id_column": "id", "shard_rows": ROWS // SHARDS, "format": "lance"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "in.parquet", ROWS, row_group_size=ROWS // SHARDS)


def table(out: Path | str, **options: str) -> Any:
    lance = pytest.importorskip("lance")
    return lance.dataset(f"{out}/vectors.lance", storage_options=options)


def check(found: Any, count: int) -> None:
    """Ids 0 to count - 1 in their order, each with its own vector."""
    rows = found.to_table().to_pylist()
    assert [row["id"] for row in rows] == [row["row"] for row in rows] == list(range(count))
    for row in rows:
        np.testing.assert_allclose(row["vector"], expected(text_of(row["id"])), atol=1e-6)


def data(out: Path) -> set[str]:
    return {path.name for path in (out / "vectors.lance" / "data").glob("*")}


def test_a_table_of_all_shards(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    summary, status = embed(source, out, window_rows=7, **SETTINGS)
    assert (status, summary.reason, summary.duplicate_ids) == (0, "", 0)
    found = table(out)
    check(found, ROWS)
    assert len(found.get_fragments()) == SHARDS
    assert found.schema.metadata[b"model"] == b"fake"
    assert summary.output_bytes == sum(path.stat().st_size for path in (out / "vectors.lance/data").iterdir())
    assert list(out.glob("*.parquet")) == []
    again, status = embed(source, out, **SETTINGS)
    assert (status, again.shards_of_this_run, table(out).version) == (0, 0, found.version)
    (out / "vectors.lance" / "data" / min(data(out))).unlink()
    assert embed(source, out, **SETTINGS)[0].shards_of_this_run == 1
    check(table(out), ROWS)


@pytest.mark.parametrize("vectors", ["float32", "float16", "int8", "bits"])
def test_values_are_those_of_parts(tmp_path: Path, source: Path, vectors: str) -> None:
    from pyarrow import parquet as pq

    embed(source, tmp_path / "a", id_column="id", vectors=vectors)
    embed(source, tmp_path / "b", vectors=vectors, **SETTINGS)
    parts, found = pq.read_table(tmp_path / "a"), table(tmp_path / "b").to_table()
    for name in ("id", "row", "vector"):
        assert found[name].to_pylist() == parts[name].to_pylist()
    assert found.schema.field("vector").type.value_type == parts.schema.field("vector").type.value_type


def test_nothing_is_there_before_all_is(tmp_path: Path, source: Path) -> None:
    class Dying(FakeEngine):
        def step(self, batch):  # type: ignore[no-untyped-def]
            if len(self.batches) > 9:
                self.die()
                raise EngineDeadError("gone")
            return super().step(batch)

    out = tmp_path / "out"
    assert embed(source, out, fake_model(Dying()), window_rows=7, **SETTINGS)[1] == 3
    done = markers(out)
    assert 0 < len(done) < SHARDS
    with pytest.raises(ValueError, match="not found"):
        table(out)
    summary, status = embed(source, out, **SETTINGS)
    assert (status, summary.shards_of_this_run) == (0, SHARDS - len(done))
    check(table(out), ROWS)
    assert len(data(out)) == SHARDS, "what killed shards had written is still there"


def test_a_driver_that_is_killed_goes_on(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    flags = (source, out, "--id-column", "id", "--shard-rows", str(ROWS // SHARDS), "--format", "lance")
    with CorpusProcess(*flags, "--window-rows", "7", FAKE_STEP_S="0.03") as process:
        process.until(lambda: len(list((out / "_corpus" / "done").glob("*"))) >= 3)
        process.signal(signal.SIGKILL)
        process.wait()
    done = markers(out)
    assert 3 <= len(done) < SHARDS
    status, summary, err = run(*flags)
    assert (status, summary["shards_of_this_run"]) == (0, SHARDS - len(done)), err
    check(table(out), ROWS)
    assert len(data(out)) == SHARDS


def test_rejected_rows_and_no_rows(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"id": [0, 1, 2], "text": ["row 0 ", None, ""]})
    summary, status = embed(source, tmp_path / "out", **SETTINGS | {"shard_rows": 1})
    assert (status, summary.rejected, table(tmp_path / "out").count_rows()) == (0, 2, 1)
    none = write_parquet(tmp_path / "none.parquet", {"id": [0], "text": [""]})
    assert embed(none, tmp_path / "none", **SETTINGS)[1] == 0
    assert table(tmp_path / "none").count_rows() == 0


def test_another_s_table_is_not_written_over(tmp_path: Path, source: Path) -> None:
    embed(source, tmp_path / "a", **SETTINGS)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "vectors.lance").rename(tmp_path / "b" / "vectors.lance")
    with pytest.raises(RefusedError, match=r"has vectors\.lance and no job that it is of"):
        embed(source, tmp_path / "b", **SETTINGS)
    embed(source, tmp_path / "b", redo=True, id_column="id")
    assert not (tmp_path / "b" / "vectors.lance").exists()


def test_a_place_that_lance_does_not_know_is_refused(source: Path) -> None:
    with pytest.raises(CorpusError, match=r"--format lance writes to a path, .* not to memory://"):
        embed(source, "memory://lance/out", **SETTINGS)


@pytest.mark.parametrize("by", ["environment", "url"])
def test_a_table_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, by: str) -> None:
    monkeypatch.setattr(lock, "_SETTLE_S", 0.0)
    with s3_server() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        bucket, query = server.bucket(), ""
        put(f"{bucket}/in.parquet", source.read_bytes())
        options = {"aws_endpoint": server.url, "aws_allow_http": "true", "aws_region": "us-east-1"}
        if by == "url":
            monkeypatch.delenv("AWS_ENDPOINT_URL")
            monkeypatch.delenv("AWS_REGION")
            query = f"?endpoint_override={server.url}&region=us-east-1"
        for shards in (SHARDS, 0):
            summary, status = embed(f"{bucket}/in.parquet{query}", f"{bucket}/out{query}", **SETTINGS)
            assert (status, summary.reason, summary.shards_of_this_run) == (0, "", shards)
        check(table(f"{bucket}/out", **options), ROWS)
