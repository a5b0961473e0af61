"""A rerun does what is missing and nothing else, and never mixes two jobs."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.corpus import job as manifest
from gateway.corpus import parts as parts_of
from gateway.corpus.errors import OutputError, RefusedError
from gateway.corpus.lock import Lock
from gateway.corpus.store import Store
from rose.errors import EngineDeadError
from tests.corpus.jobs import (
    check_complete,
    embed,
    fake_model,
    leftovers,
    markers,
    rows,
    write_parquet,
    write_texts,
)
from tests.fakes import FakeEngine, fake_info


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "in.parquet", 200, row_group_size=50)


def sequences_of(engine: FakeEngine) -> int:
    """Sequences that were embedded, but for those of the first steps of a start."""
    return sum(batch.num_seqs for batch in engine.batches) - 3


def test_a_second_run_embeds_nothing(tmp_path: Path, source: Path) -> None:
    first, second = FakeEngine(), FakeEngine()
    embed(source, tmp_path / "out", fake_model(first), id_column="id", shard_rows=50)
    assert sequences_of(first) == 200
    before = markers(tmp_path / "out")
    summary, status = embed(source, tmp_path / "out", fake_model(second), id_column="id", shard_rows=50)
    assert (status, summary.status, summary.shards_of_this_run) == (0, "complete", 0)
    assert second.batches == []
    assert markers(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["part-000002.parquet", "_corpus/done/000002.json"])
def test_a_file_that_is_missing_is_made_again(tmp_path: Path, source: Path, name: str) -> None:
    embed(source, tmp_path / "out", id_column="id", shard_rows=50)
    (tmp_path / "out" / name).unlink()
    engine = FakeEngine()
    summary, status = embed(source, tmp_path / "out", fake_model(engine), id_column="id", shard_rows=50)
    assert (status, summary.shards_of_this_run, sequences_of(engine)) == (0, 1, 50)
    check_complete(tmp_path / "out", 200)


def test_a_part_that_was_cut_short_is_made_again(tmp_path: Path, source: Path) -> None:
    embed(source, tmp_path / "out", id_column="id", shard_rows=50)
    part = tmp_path / "out" / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-10])
    summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=50)
    assert (status, summary.shards_of_this_run) == (0, 1)
    check_complete(tmp_path / "out", 200)


CHANGES = {
    "dtype was 'auto', is 'bfloat16'": ({}, fake_model(dtype="bfloat16")),
    r"model was fake \(d1\), is fake \(d2\)": ({}, fake_model(digest="d2")),
    "text_column was 'text', is 'other'": ({"text_column": "other"}, None),
    "vectors was 'float32', is 'int8'": ({"vectors": "int8"}, None),
    "dimensions was not given, is 4": ({"dimensions": 4}, None),
    "prompt was not given, is 'p'": ({"prompt": "p"}, None),
    "id_column was not given, is 'id'": ({"id_column": "id"}, None),
    "truncate was 'off', is 'end'": ({"truncate": "end"}, None),
}


@pytest.mark.parametrize("message", CHANGES)
def test_another_job_is_refused_by_what_differs_or_redone(tmp_path: Path, message: str) -> None:
    columns = {"id": [1, 2, 3], "text": ["a", "b", "c"], "other": ["x", "y", "z"]}
    source = write_parquet(tmp_path / "in.parquet", columns)
    options, model = CHANGES[message]
    embed(source, tmp_path / "out", shard_rows=1)
    before = rows(tmp_path / "out")
    with pytest.raises(RefusedError, match=message):
        embed(source, tmp_path / "out", model, **{"shard_rows": 1} | options)
    assert rows(tmp_path / "out") == before
    summary, status = embed(source, tmp_path / "out", model, **{"shard_rows": 1} | options, redo=True)
    assert (status, summary.shards_of_this_run, summary.rows_out) == (0, 3, 3)
    if model is None and "truncate" not in options:
        assert rows(tmp_path / "out") != before


@pytest.mark.parametrize("name", ["job.json", "plan.parquet", "files.parquet", "engine.json"])
def test_a_damaged_job_is_named_and_can_be_redone(tmp_path: Path, source: Path, name: str) -> None:
    out = tmp_path / "out"
    embed(source, out, id_column="id", shard_rows=50)
    (out / "_corpus" / name).write_bytes(b"{")
    (out / "part-000003.parquet").unlink()
    try:
        reason = embed(source, out, id_column="id", shard_rows=50)[0].reason
    except RefusedError as error:
        reason = str(error)
    assert "is damaged" in reason
    assert "--redo" in reason
    assert embed(source, out, id_column="id", shard_rows=100, redo=True)[1] == 0
    check_complete(out, 200)


def test_a_damaged_marker_costs_its_shard_alone(tmp_path: Path, source: Path) -> None:
    embed(source, tmp_path / "out", id_column="id", shard_rows=50)
    (tmp_path / "out" / "_corpus" / "done" / "000001.json").write_bytes(b"")
    assert embed(source, tmp_path / "out", id_column="id", shard_rows=50)[0].shards_of_this_run == 1
    check_complete(tmp_path / "out", 200)


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path, source: Path) -> None:
    embed(source, tmp_path / "out", id_column="id")
    part = tmp_path / "out" / "part-000000.parquet"
    part.write_bytes(b"x" * part.stat().st_size)
    with pytest.raises(OutputError, match=r"part-000000\.parquet is damaged: .*; remove it"):
        embed(source, tmp_path / "out", id_column="id")


@pytest.mark.parametrize("name", ["part-000000.parquet", "mine.parquet"])
def test_files_that_are_not_ours_are_not_written_over(tmp_path: Path, source: Path, name: str) -> None:
    mine = write_texts(tmp_path / "out" / name, 3).read_bytes()
    with pytest.raises(RefusedError, match=f"has {name} and no job that it is of"):
        embed(source, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == mine


def test_settings_may_change_until_a_shard_is_done(tmp_path: Path, source: Path) -> None:
    _, status = embed(source, tmp_path / "out", dimensions=99, shard_rows=50)
    assert status == 1
    assert embed(source, tmp_path / "out", dimensions=4, shard_rows=100)[0].shards == 2


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    write_texts(tmp_path / "in" / "a.parquet", 10)
    embed(tmp_path / "in", tmp_path / "out")
    write_texts(tmp_path / "in" / "b.parquet", 20)
    with pytest.raises(RefusedError, match=r"b\.parquet is new"):
        embed(tmp_path / "in", tmp_path / "out")
    write_texts(tmp_path / "in" / "a.parquet", 11)
    (tmp_path / "in" / "b.parquet").unlink()
    with pytest.raises(RefusedError, match=r"a\.parquet was written again"):
        embed(tmp_path / "in", tmp_path / "out")
    summary, _ = embed(tmp_path / "in", tmp_path / "out", redo=True)
    assert (summary.rows_out, len(rows(tmp_path / "out"))) == (11, 11)


@pytest.mark.parametrize("way", ["dots", "link", "link to OUT"])
def test_parts_in_in_are_known_by_whatever_way_it_is_named(tmp_path: Path, way: str) -> None:
    texts = tmp_path / "in"
    write_texts(texts / "a.parquet", 10)
    (texts / "out").mkdir()
    (tmp_path / "link").symlink_to(texts)
    (tmp_path / "linked-out").symlink_to(texts / "out")
    source, out = {
        "dots": (texts / ".." / "in", texts / "out"),
        "link": (tmp_path / "link", texts / "out"),
        "link to OUT": (texts, tmp_path / "linked-out"),
    }[way]
    for shards in (1, 0):
        summary, status = embed(source, out)
        assert (status, summary.files, summary.shards_of_this_run) == (0, 1, shards)
    assert {row["file"] for row in rows(out)} == {f"{source}/a.parquet"}


def test_redo_leaves_no_part_of_a_larger_job(tmp_path: Path, source: Path) -> None:
    embed(source, tmp_path / "out", id_column="id", shard_rows=20)
    summary, _ = embed(source, tmp_path / "out", id_column="id", shard_rows=200, redo=True)
    assert (summary.shards, len(list((tmp_path / "out").glob("*.parquet")))) == (1, 1)
    check_complete(tmp_path / "out", 200)


def test_auto_on_another_device_is_refused(tmp_path: Path, source: Path) -> None:
    class Halves(FakeEngine):
        def __init__(self) -> None:
            super().__init__(info=replace(fake_info(), dtype="bfloat16"))

    embed(source, tmp_path / "out", shard_rows=50)
    (tmp_path / "out" / "part-000000.parquet").unlink()
    summary, status = embed(source, tmp_path / "out", fake_model(Halves()), shard_rows=50)
    assert status == 1
    assert "begun in float32 and this engine computes in bfloat16" in summary.reason


def test_two_drivers_on_one_out_are_refused(tmp_path: Path, source: Path) -> None:
    with (
        Lock(Store(str(tmp_path / "out")), "other"),
        pytest.raises(RefusedError, match=r"by process \d+ on "),
    ):
        embed(source, tmp_path / "out")
    assert embed(source, tmp_path / "out")[1] == 0


def test_a_job_that_was_never_planned_to_its_end_begins_anew(tmp_path: Path, source: Path) -> None:
    store = Store(str(tmp_path / "out"))
    manifest.save_job(store, {"text_column": "what a killed driver wrote before the plan"})
    assert embed(source, tmp_path / "out", id_column="id")[1] == 0
    check_complete(tmp_path / "out", 200)


@pytest.mark.parametrize("at", ["write", "rename", "marker"])
def test_a_full_disk_ends_the_job_and_a_rerun_completes_it(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    calls = {"left": 2}

    def fails(original: object) -> object:
        def call(*arguments: object, **options: object) -> object:
            calls["left"] -= 1
            if calls["left"] < 0 and (at != "rename" or "part" in str(arguments[1])):
                raise full
            return original(*arguments, **options)  # type: ignore[operator]

        return call

    with monkeypatch.context() as patched:
        if at == "write":
            patched.setattr(parts_of.PartWriter, "_write", fails(parts_of.PartWriter._write))
        elif at == "rename":
            patched.setattr(Path, "replace", fails(Path.replace))
        else:
            import gateway.corpus.worker as worker

            def commit(store: Store, shard: object, outcome: object) -> None:
                with store.writing("_corpus/done/x"):
                    calls["left"] -= 1
                    if calls["left"] < 0:
                        raise full

            patched.setattr(worker, "commit", commit)
        summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=50, window_rows=25)
    assert status == 1
    assert "no room is left" in summary.reason
    assert summary.balanced
    assert summary.rows_left > 0
    assert leftovers(tmp_path / "out") == []
    summary, status = embed(source, tmp_path / "out", id_column="id", shard_rows=50, window_rows=25)
    assert (status, summary.status) == (0, "complete")
    check_complete(tmp_path / "out", 200)


def test_a_dead_engine_ends_the_job_and_a_rerun_completes_it(tmp_path: Path, source: Path) -> None:
    class Dying(FakeEngine):
        def step(self, batch):  # type: ignore[no-untyped-def]
            if len(self.batches) > 6:
                self.die()
                raise EngineDeadError("gone")
            return super().step(batch)

    summary, status = embed(source, tmp_path / "out", fake_model(Dying()), id_column="id", shard_rows=20)
    assert status == 3
    assert "the engine is dead" in summary.reason
    done = markers(tmp_path / "out")
    assert 0 < len(done) < 10
    assert leftovers(tmp_path / "out") == []
    assert embed(source, tmp_path / "out", id_column="id", shard_rows=20)[1] == 0
    assert markers(tmp_path / "out").items() >= done.items()
    check_complete(tmp_path / "out", 200)
