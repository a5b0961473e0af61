"""No row is lost in silence: what has no vector is in a side file with its reason, and the sums hold."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs
from pyarrow import parquet as pq

from gateway.corpus import jsonl_input
from gateway.corpus.errors import CorpusError, RefusedError
from gateway.corpus.jsonl_input import read_jsonl
from gateway.corpus.rows import Columns, Piece
from rose.batch import BatchResult, RaggedBatch
from rose.errors import StepError
from tests.corpus.jobs import (
    TOKENIZER,
    check_complete,
    embed,
    expected,
    fake_model,
    markers,
    rejected,
    rows,
    text_of,
    write_parquet,
    write_texts,
)
from tests.corpus.processes import run
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info


def test_rows_without_text(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"id": [7, 8, 9, None], "text": ["a", None, "", "b"]})
    summary, status = embed(source, tmp_path / "out", id_column="id")
    assert status == 0
    assert (summary.rows_in, summary.rows_out, summary.rejected, summary.balanced) == (4, 2, 2, True)
    assert rejected(tmp_path / "out") == [
        {"file": str(source), "row": 1, "id": "8", "reason": "text is null"},
        {"file": str(source), "row": 2, "id": "9", "reason": "text is empty"},
    ]
    assert [row["id"] for row in rows(tmp_path / "out")] == [7, None]


def test_lines_that_are_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_input, "_MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(jsonl_input, "_BLOCK_BYTES", 64)
    lines = (
        b'{"text": "fine", "id": 1}',
        b'{"text": "cut',
        b"",
        b"[1, 2]",
        b'{"id": 5}',
        b'{"text": 6, "id": 6}',
        b'{"text": "x", "id": [7]}',
        b'{"text": "\xff", "id": 8}',
        b'{"text": "\\ud800", "id": 9}',
        b'{"text": "' + b"y" * 2000 + b'"}',
        b'{"text": "last", "id": "eleven"}',
    )
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=4)
    assert (status, summary.rows_in, summary.rows_out, summary.rejected) == (0, 11, 2, 9)
    assert [row["row"] for row in rejected(tmp_path / "out")] == list(range(1, 10))
    reasons = [row["reason"] for row in rejected(tmp_path / "out")]
    starts = ("not JSON", "the line is blank", "the line is a list", "no field 'text'", "text is of type int")
    starts += ("id is of type list", "not JSON", "not JSON", "the line is longer than 1000 bytes")
    for reason, start in zip(reasons, starts, strict=True):
        assert reason.startswith(start)
    assert [row["id"] for row in rows(tmp_path / "out")] == ["1", "eleven"]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    marked = "@@@@"
    source = write_parquet(
        tmp_path / "in.parquet", {"text": ["a", marked, "b"]}, compression="none", use_dictionary=False
    )
    source.write_bytes(source.read_bytes().replace(marked.encode(), b"\xff\xfe\xfd\xfc"))
    summary, status = embed(source, tmp_path / "out")
    assert (status, summary.rows_out) == (0, 2)
    assert [row["reason"] for row in rejected(tmp_path / "out")] == ["text is not UTF-8"]


@pytest.mark.parametrize("column", ["text_column", "id_column"])
def test_a_field_that_no_line_has_is_refused(tmp_path: Path, column: str) -> None:
    (tmp_path / "a.jsonl").write_text("no object\n" + '{"id": 1, "text": "a"}\n' * 3)
    with pytest.raises(CorpusError, match=r"no line of IN has a field 'body'.*they have id, text"):
        embed(tmp_path, tmp_path / "out", **{column: "body"})
    (tmp_path / "b.jsonl").write_text('{"body": "x", "text": "y"}\n')
    assert embed(tmp_path, tmp_path / "out", **{column: "body"})[0].rows_in == 5


def test_a_column_of_nulls_alone_is_one_of_no_texts(tmp_path: Path) -> None:
    empty = {"id": pa.nulls(0), "text": pa.nulls(0)}
    write_parquet(tmp_path / "in" / "a.parquet", empty)
    write_parquet(tmp_path / "in" / "b.parquet", {"id": pa.nulls(2), "text": pa.nulls(2)})
    write_parquet(tmp_path / "in" / "c.parquet", {"id": [5], "text": ["c"]})
    summary, status = embed(tmp_path / "in", tmp_path / "out", id_column="id")
    assert (status, summary.rows_in, summary.rejected) == (0, 3, 2)
    assert [row["id"] for row in rows(tmp_path / "out")] == [5]


def test_a_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(CorpusError, match="has 2 columns 'text'; one is wanted"):
        embed(tmp_path / "in.parquet", tmp_path / "out")


def test_files_of_other_kinds_are_counted_and_suffixes_have_any_case(tmp_path: Path) -> None:
    for name in ("a.JSONL", "b.jsonl", "c.json", "d.csv", "_hidden.csv"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    summary, _ = embed(tmp_path, tmp_path / "out")
    assert (summary.files, summary.other_files, summary.rows_out) == (2, 2, 2)


def test_an_id_that_is_not_utf8(tmp_path: Path) -> None:
    ids = pa.array([b"\xff", b"ok"]).view(pa.string())
    source = write_parquet(tmp_path / "in.parquet", {"id": ids, "text": ["a", "b"]})
    assert embed(source, tmp_path / "out", id_column="id")[0].rows_out == 1
    assert [(row["row"], row["reason"]) for row in rejected(tmp_path / "out")] == [(0, "id is not UTF-8")]


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).write_text("{}")
    with pytest.raises(CorpusError, match="cannot be read: 'utf-8' codec"):
        embed(tmp_path, tmp_path / "out")


def corrupt_group(path: Path, number: int) -> None:
    """Overwrite the text pages of one row group."""
    chunk = pq.ParquetFile(path).metadata.row_group(number).column(1)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + chunk.total_compressed_size] = b"\xa5" * chunk.total_compressed_size
    path.write_bytes(content)


def test_a_corrupt_row_group_costs_its_own_rows(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.parquet", 200, row_group_size=50)
    corrupt_group(source, 1)
    summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=100, window_rows=20)
    assert (status, summary.status) == (1, "damaged")
    assert (summary.rows_in, summary.rows_out, summary.rejected, summary.balanced) == (200, 150, 50, True)
    lost = rejected(tmp_path / "out")
    assert [row["row"] for row in lost] == list(range(50, 100))
    assert all(row["reason"].startswith("row group 1 cannot be read: ") for row in lost)
    assert list(summary.damaged) == [0]
    assert sorted(row["id"] for row in rows(tmp_path / "out")) == [*range(50), *range(100, 200)]


def test_a_corrupt_footer_does_not_end_the_process(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in" / "a.parquet", 20, row_group_size=10)
    # Of the last text column: the length of an empty list of its sizes, which pyarrow checks by column.
    before, sizes, after = source.read_bytes().rpartition(b"\x19\x06\x19\x26\x00")
    assert sizes
    source.write_bytes(before + b"\x19\x46\x19\x26\x00" + after)
    write_texts(tmp_path / "in" / "b.parquet", 10, first=20)
    status, summary, _ = run(tmp_path / "in", tmp_path / "out")
    assert (status, summary["status"], summary["rows_out"], summary["rejected"]) == (1, "damaged", 20, 10)
    assert all(row["reason"].startswith("row group 1 cannot be read: ") for row in rejected(tmp_path / "out"))


def test_a_damaged_shard_is_tried_again(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.parquet", 200, row_group_size=50)
    whole, times = source.read_bytes(), (source.stat().st_atime_ns, source.stat().st_mtime_ns)
    corrupt_group(source, 1)
    _set_times(source, times)
    embed(source, tmp_path / "out", id_column="id", shard_rows=100)
    before = markers(tmp_path / "out")
    source.write_bytes(whole)
    _set_times(source, times)
    summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=100)
    assert (status, summary.status, summary.shards_of_this_run) == (0, "complete", 1)
    assert markers(tmp_path / "out")[1] == before[1]
    check_complete(tmp_path / "out", 200)
    assert rejected(tmp_path / "out") == []


def _set_times(path: Path, times: tuple[int, int]) -> None:
    os.utime(path, ns=times)


def test_a_truncated_gzip_gives_what_can_be_read(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": id_, "text": text_of(id_) + str(id_ * 7919 % 104729 * 7.1)}) for id_ in range(5000)
    ]
    packed = gzip.compress("\n".join(lines).encode() + b"\n")
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "whole"}\n'))
    summary, status = embed(source, tmp_path / "out", shard_rows=1000)
    assert (status, summary.status, summary.balanced) == (1, "damaged", True)
    assert "the file ends early" in next(iter(summary.damaged.values()))
    assert 1000 < summary.rows_out < 4000
    assert summary.rejected <= 1  # the line that the cut went through
    found = rows(tmp_path / "out")
    assert [row["row"] for row in found[:-1]] == list(range(len(found) - 1))
    np.testing.assert_allclose(found[-1]["vector"], expected("whole"), atol=1e-6)


def test_a_file_without_a_footer_is_named_and_others_go_on(tmp_path: Path) -> None:
    write_texts(tmp_path / "in" / "a.parquet", 10)
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1 no more than this")
    write_texts(tmp_path / "in" / "c.parquet", 10, first=10)
    summary, status = embed(tmp_path / "in", tmp_path / "out", id_column="id")
    assert (status, summary.status, summary.rows_out) == (1, "damaged", 20)
    assert "the file cannot be read" in next(iter(summary.damaged.values()))


class Broken(io.BytesIO):
    """What a file holds whose disk does not answer."""

    def read(self, *_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def shut(monkeypatch: pytest.MonkeyPatch, name: str, *, opens: bool) -> None:
    """A file of this name cannot be read, even by root."""

    class Shut(fs.LocalFileSystem):
        def open_input_file(self, path: str) -> pa.NativeFile:
            if not path.endswith(name):
                return super().open_input_file(path)
            if opens:
                return pa.PythonFile(Broken(b"0" * 100), "r")
            raise PermissionError(errno.EACCES, "Permission denied")

        def open_input_stream(self, path: str, **options: Any) -> pa.NativeFile:
            return (
                self.open_input_file(path)
                if path.endswith(name)
                else super().open_input_stream(path, **options)
            )

    monkeypatch.setattr(fs, "LocalFileSystem", Shut)


@pytest.mark.parametrize(("opens", "why"), [(True, "Input/output error"), (False, "Permission denied")])
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_cannot_be_read_is_not_planned_without_its_rows(
    tmp_path: Path, name: str, opens: bool, why: str
) -> None:
    line = b'{"text": "a"}\n'
    packed = {".gz": gzip.compress, ".zst": jsonl_input.zstd.compress}.get(Path(name).suffix, bytes)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(packed(line))
    if name.endswith("parquet"):
        write_parquet(tmp_path / "in" / name, {"text": ["a"]})
    (tmp_path / "in" / "b.jsonl").write_bytes(line)
    with pytest.MonkeyPatch.context() as patched:
        shut(patched, name, opens=opens)
        with pytest.raises(RefusedError, match=rf"{name} cannot be opened or read: .*{why}"):
            embed(tmp_path / "in", tmp_path / "out")
    summary, status = embed(tmp_path / "in", tmp_path / "out")
    assert (status, summary.rows_out) == (0, 2)


def test_ids_of_a_file_that_cannot_be_read_have_no_type(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.parquet", 10)
    embed(source, tmp_path / "out", id_column="id", shard_rows=5)
    (tmp_path / "out" / "part-000001.parquet").unlink()
    with pytest.MonkeyPatch.context() as patched:
        shut(patched, "in.parquet", opens=False)
        with pytest.raises(RefusedError, match="cannot be opened or read"):
            embed(source, tmp_path / "out", id_column="id", shard_rows=5)
    assert embed(source, tmp_path / "out", id_column="id", shard_rows=5)[1] == 0
    check_complete(tmp_path / "out", 10)


def test_a_piece_without_rows_has_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    piece = Piece(str(tmp_path / "a.jsonl"), 0, 0, damage="the file ends early")
    assert list(read_jsonl(fs.LocalFileSystem(), piece, Columns("text", None))) == []


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_is_not_what_its_name_says_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    summary, status = embed(tmp_path, tmp_path / "out")
    assert (status, summary.status, summary.rows_out) == (1, "damaged", 1)


def test_a_long_footer_is_read_whole(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    table = pa.table({"text": ["a", "b"]})
    pq.write_table(table.replace_schema_metadata({"long": os.urandom(100_000).hex()}), source)
    assert embed(source, tmp_path / "out")[0].rows_out == 2


def test_a_file_that_vanishes_while_the_job_runs(tmp_path: Path) -> None:
    first = write_texts(tmp_path / "in" / "a.parquet", 10)
    second = write_texts(tmp_path / "in" / "b.parquet", 10, first=10)
    engine = FakeEngine(service_s=lambda batch: second.unlink(missing_ok=True) or 0.001)
    summary, status = embed(first.parent, tmp_path / "out", fake_model(engine), id_column="id", shard_rows=10)
    assert status == 1
    assert summary.balanced
    assert (summary.rows_out, summary.rejected) == (10, 10)


class PickyEngine(FakeEngine):
    """Fails steps that hold a text with this token, or gives it a vector that is not finite."""

    def __init__(self, token: int, *, fails: bool) -> None:
        super().__init__()
        self._token, self._fails = token, fails

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        bad = np.flatnonzero(batch.input_ids == self._token)
        if len(bad) and self._fails:
            self.fail_next(StepError("an unlucky token"))
        return super().step(batch)

    def _outcome(self, batch: RaggedBatch) -> BatchResult | StepError:
        outcome = super()._outcome(batch)
        bad = np.flatnonzero(batch.input_ids == self._token)
        if len(bad) == 0 or self._fails:
            return outcome
        spoilt = sorted({int(np.searchsorted(batch.cu_seqlens, at, side="right")) - 1 for at in bad})
        outcome.vectors[spoilt] = np.nan
        return BatchResult(outcome.vectors, outcome.int8, tuple(spoilt))


@pytest.mark.parametrize("fails", [True, False])
def test_a_row_at_fault_does_not_take_others_with_it(tmp_path: Path, fails: bool) -> None:
    texts = [f"row {number}" for number in range(50)]
    texts[17] = "row ~"
    source = write_parquet(tmp_path / "in.parquet", {"text": texts})
    model = fake_model(PickyEngine(int(TOKENIZER.encode(["~"])[0][1]), fails=fails))
    summary, status = embed(source, tmp_path / "out", model)
    assert (status, summary.rows_out) == (0, 49)
    [row] = rejected(tmp_path / "out")
    assert row["row"] == 17
    assert ("unlucky" if fails else "NaN") in row["reason"]


def test_values_beyond_float16_are_rejected(tmp_path: Path) -> None:
    class Wide(FakeEngine):
        def _outcome(self, batch: RaggedBatch) -> BatchResult:
            outcome = super()._outcome(batch)
            outcome.vectors[np.diff(batch.cu_seqlens) > 10] *= 1e6
            return outcome

    source = write_parquet(tmp_path / "in.parquet", {"text": ["short", "a longer text", "tiny"]})
    summary, _ = embed(source, tmp_path / "out", fake_model(Wide()), vectors="float16", normalize=False)
    assert summary.rows_out == 2
    assert "65504" in rejected(tmp_path / "out")[0]["reason"]


def test_duplicate_ids_are_counted_or_refused(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"id": [1, 2, 1, 3, 1, 2], "text": list("abcdef")})
    summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=2)
    assert (status, summary.duplicate_ids, summary.rows_out) == (0, 3, 6)
    engine = FakeEngine(info=fake_info())
    with pytest.raises(RefusedError, match="3 of 6 rows have an id"):
        embed(source, tmp_path / "no", fake_model(engine), id_column="id", refuse_duplicate_ids=True)
    assert engine.batches == []
    assert not list((tmp_path / "no").glob("*.parquet"))
