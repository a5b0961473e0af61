"""Files in, vectors out: every kind of input, every type of vector, every way to name them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from gateway.corpus import command
from gateway.corpus.errors import CorpusError
from gateway.corpus.options import CorpusOptions
from gateway.dtypes import Dtype, cast
from tests.corpus.jobs import (
    check_complete,
    embed,
    expected,
    fake_model,
    leftovers,
    parts,
    rejected,
    rows,
    text_of,
    write_parquet,
    write_texts,
)
from tests.fakes import FakeEngine, fake_info

try:
    from compression import zstd
except ImportError:
    from backports import zstd  # type: ignore[no-redef]


def test_a_file_in_many_shards(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.parquet", 250, row_group_size=60)
    summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=100, window_rows=32)
    assert status == 0
    assert (summary.status, summary.rows_in, summary.rows_out, summary.rejected) == ("complete", 250, 250, 0)
    assert (summary.shards, summary.duplicate_ids, summary.balanced) == (4, 0, True)
    assert summary.tokens == sum(len(text_of(id_)) + 2 for id_ in range(250))
    check_complete(tmp_path / "out", 250)
    assert leftovers(tmp_path / "out") == []


def test_rows_are_known_by_file_and_number(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_parquet(source / "a.parquet", {"text": ["one", "two"]})
    write_parquet(source / "deep" / "b.parquet", {"text": ["three"]})
    write_parquet(source / "_hidden" / "c.parquet", {"text": ["four"]})
    (source / "notes.md").write_text("not a corpus")
    embed(source, tmp_path / "out")
    found = rows(tmp_path / "out")
    places = [(Path(row["file"]).name, row["row"]) for row in found]
    assert places == [("a.parquet", 0), ("a.parquet", 1), ("b.parquet", 0)]
    assert "id" not in found[0]
    for row, text in zip(found, ("one", "two", "three"), strict=True):
        np.testing.assert_allclose(row["vector"], expected(text), atol=1e-6)


def test_small_files_share_a_shard(tmp_path: Path) -> None:
    for number in range(10):
        write_texts(tmp_path / "in" / f"{number}.parquet", 10, first=10 * number)
    summary, _ = embed(tmp_path / "in", tmp_path / "out", id_column="id", shard_rows=35)
    assert summary.shards == 4
    check_complete(tmp_path / "out", 100)


@pytest.mark.parametrize(
    ("suffix", "packed"),
    [(".jsonl", bytes), (".jsonl.gz", gzip.compress), (".jsonl.zst", zstd.compress), (".ndjson", bytes)],
)
def test_lines_of_json(tmp_path: Path, suffix: str, packed: object) -> None:
    lines = "".join(json.dumps({"key": id_, "body": text_of(id_), "x": [1]}) + "\n" for id_ in range(100))
    source = tmp_path / f"in{suffix}"
    source.write_bytes(packed(("\ufeff" + lines.rstrip("\n")).encode()))  # type: ignore[operator]
    summary, status = embed(
        source, tmp_path / "out", text_column="body", id_column="key", shard_rows=30, window_rows=7
    )
    assert (status, summary.shards, summary.rows_out) == (0, 4, 100)
    found = rows(tmp_path / "out")
    assert [row["id"] for row in found] == [str(id_) for id_ in range(100)]
    for row in found:
        np.testing.assert_allclose(row["vector"], expected(text_of(int(row["id"]))), atol=1e-6)


def test_a_pattern_names_files(tmp_path: Path) -> None:
    for name in ("a-1.parquet", "a-2.parquet", "b-1.parquet", "deep/a-3.parquet"):
        write_parquet(tmp_path / "in" / name, {"text": [name]})
    named = {"a-*.parquet": 2, "**/a-*.parquet": 3, "[b]-?.parquet": 1, "*/*.parquet": 1}
    for number, (pattern, count) in enumerate(named.items()):
        summary, _ = embed(f"{tmp_path}/in/{pattern}", tmp_path / f"out{number}")
        assert summary.rows_out == count, pattern


@pytest.mark.parametrize("model_int8", [False, True])
@pytest.mark.parametrize(
    ("vectors", "value", "dtype"),
    [
        ("float32", pa.float32(), Dtype.FLOAT32),
        ("float16", pa.float16(), Dtype.FLOAT16),
        ("int8", pa.int8(), Dtype.INT8),
        ("bits", pa.uint8(), Dtype.UBINARY),
    ],
)
def test_types_are_those_of_the_api(
    tmp_path: Path, vectors: str, value: pa.DataType, dtype: Dtype, model_int8: bool
) -> None:
    info = fake_info(dimensions=16, has_int8=model_int8)
    source = write_parquet(tmp_path / "in.parquet", {"text": ["some", "text of it", "x"]})
    engine = FakeEngine(info=info)
    embed(source, tmp_path / "out", fake_model(engine), vectors=vectors, dimensions=8)
    column = parts(tmp_path / "out").column("vector").combine_chunks()
    assert column.type == pa.list_(pa.field("element", value, nullable=False), 1 if vectors == "bits" else 8)
    raw = np.array([row["vector"] for row in rows(tmp_path / "out")])
    wide = np.array([expected(text, info) for text in ("some", "text of it", "x")], np.float32)
    cut = wide[:, :8] / np.linalg.norm(wide[:, :8], axis=1, keepdims=True)
    if dtype is Dtype.INT8 and model_int8:
        return  # of the values before they are normalised, which the API's tests hold
    np.testing.assert_allclose(raw, cast(cut.astype(np.float32), None, dtype), atol=2e-3)


@pytest.mark.parametrize(
    ("vectors", "most"), [("float32", 4.0), ("float16", 2.0), ("int8", 1.0), ("bits", 1 / 8)]
)
def test_a_value_takes_no_more_than_its_type(tmp_path: Path, vectors: str, most: float) -> None:
    info = fake_info(dimensions=1024, has_int8=True)
    texts = [f"text number {number}" for number in range(400)]
    source = write_parquet(tmp_path / "in.parquet", {"text": texts})
    embed(source, tmp_path / "out", fake_model(FakeEngine(info=info)), vectors=vectors)
    (part,) = (tmp_path / "out").glob("*.parquet")
    assert part.stat().st_size <= most * 400 * 1024 * 1.05 + 8000


def test_normalisation_and_prompts(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"text": ["some"]})
    embed(source, tmp_path / "a", normalize=False)
    assert abs(np.linalg.norm(rows(tmp_path / "a")[0]["vector"]) - 1) > 1e-3
    embed(source, tmp_path / "b", prompt="say: ")
    np.testing.assert_allclose(rows(tmp_path / "b")[0]["vector"], expected("say: some"), atol=1e-6)


@pytest.mark.parametrize(("truncate", "kept"), [("end", "a" * 510), ("start", "z" * 510)])
def test_long_texts_are_cut_on_demand(tmp_path: Path, truncate: str, kept: str) -> None:
    text = "a" * 510 + "m" * 3 + "z" * 510
    source = write_parquet(tmp_path / "in.parquet", {"text": [text, "short"]})
    summary, _ = embed(source, tmp_path / "out", truncate=truncate)
    assert summary.rejected == 0
    np.testing.assert_allclose(rows(tmp_path / "out")[0]["vector"], expected(kept), atol=1e-6)
    embed(source, tmp_path / "off")
    assert [row["reason"] for row in rejected(tmp_path / "off")] == ["text has more than 512 tokens"]


def test_columns_by_dictionary_and_large_strings(tmp_path: Path) -> None:
    texts = ["one", "two", "one", None]
    for number, column in enumerate(
        (pa.array(texts).dictionary_encode(), pa.array(texts, pa.large_string()))
    ):
        source = write_parquet(tmp_path / f"{number}.parquet", {"text": column, "id": ["a", "b", "c", "d"]})
        summary, _ = embed(source, tmp_path / f"out{number}", id_column="id")
        assert (summary.rows_out, summary.rejected) == (3, 1)
        assert [row["id"] for row in rows(tmp_path / f"out{number}")] == ["a", "b", "c"]


def test_parts_say_what_made_them(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"text": ["some"]})
    embed(source, tmp_path / "out")
    metadata = pq.read_schema(tmp_path / "out" / "part-000000.parquet").metadata
    assert metadata[b"model"] == b"fake"
    assert metadata[b"weights"] == b"d1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "body"}, "no column 'body'; it has id, text, number"),
        ({"text_column": "number"}, "column 'number' is double; it must hold strings"),
        ({"id_column": "number"}, "column 'number' is double; ids are integers or strings"),
    ],
)
def test_columns_that_cannot_be_read_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"id": [1], "text": ["a"], "number": [1.5]})
    with pytest.raises(CorpusError, match=message):
        embed(source, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 9}, "--dimensions is 9; fake takes 1 to 8"),
        ({"vectors": "bits", "dimensions": 7}, "7 dimensions do not fill bytes"),
        ({"prompt_name": "poem"}, "prompt_name is 'poem'; this model has none"),
    ],
)
def test_what_the_model_does_not_do_ends_the_job(tmp_path: Path, options: dict, message: str) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    summary, status = embed(source, tmp_path / "out", **options)
    assert status == 1
    assert message in summary.reason
    assert (summary.rows_left, summary.balanced) == (1, True)


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such file"):
        embed(tmp_path / "missing.parquet", tmp_path / "out")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(CorpusError, match="no files of the kinds"):
        embed(tmp_path / "a.csv", tmp_path / "out")
    one = write_parquet(tmp_path / "in" / "a.parquet", {"text": ["a"], "id": [1]})
    write_parquet(tmp_path / "in" / "b.parquet", {"text": ["a"], "id": ["x"]})
    with pytest.raises(CorpusError, match="must be of one type"):
        embed(one.parent, tmp_path / "out", id_column="id")


def test_a_summary_that_cannot_be_written_is_still_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_texts(tmp_path / "in.parquet", 3)
    (tmp_path / "folder").mkdir()
    options = CorpusOptions(str(source), str(tmp_path / "out"), summary=str(tmp_path / "folder"))
    assert command.run(options, None, fake_model(), "test") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rows_out"] == 3
    assert "error: --summary: " in printed.err


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write_texts(tmp_path / "elsewhere" / "sub" / "a.parquet", 2)
    write_texts(tmp_path / "in" / "own" / "b.parquet", 3)
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "own" / "up").symlink_to(tmp_path / "in")
    assert embed(tmp_path / "in", tmp_path / "out")[0].rows_out == 5
