"""Rows as points of Qdrant: all of them, once, under the same ids in every run."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gateway.corpus import qdrant
from gateway.corpus.options import QdrantOptions
from gateway.corpus.points import point_id
from tests.corpus.jobs import (
    check_complete,
    embed,
    expected,
    leftovers,
    markers,
    text_of,
    write_parquet,
    write_texts,
)
from tests.corpus.processes import CorpusProcess, run
from tests.corpus.qdrant_server import Collection, QdrantServer, qdrant_server

ROWS, SHARDS = 200, 10


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[QdrantServer]:
    monkeypatch.setattr(qdrant, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(qdrant, "_LAST_PAUSE_S", 0.01)
    with qdrant_server() as served:
        yield served


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "in.parquet", ROWS, row_group_size=ROWS // SHARDS)


def into(server: QdrantServer, **fields: object) -> dict[str, object]:
    """Options of a job that writes there."""
    place = QdrantOptions(server.url, "texts", **fields)  # type: ignore[arg-type]
    return {"qdrant": place, "shard_rows": ROWS // SHARDS}


def check(points: Collection, count: int) -> None:
    """Ids 0 to count - 1 are there, each with its own vector and payload."""
    assert sorted(points.points) == list(range(count))
    for id_, (vector, payload) in points.points.items():
        assert payload == {"file": payload["file"], "row": id_, "id": id_}
        np.testing.assert_allclose(vector, expected(text_of(id_)), atol=1e-6)


def test_points_beside_parts(server: QdrantServer, tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    summary, status = embed(source, out, id_column="id", **into(server, key="k"))
    assert (status, summary.rows_out) == (0, ROWS), summary.reason
    check_complete(out, ROWS)
    texts = server.collections["texts"]
    assert texts.vectors == {"size": 8, "distance": "Cosine"}
    check(texts, ROWS)
    assert server.keys == {"k"}
    again = embed(source, out, id_column="id", **into(server))[0]
    assert (again.shards_of_this_run, set(texts.upserts.values())) == (0, {1})


def test_points_in_place_of_parts_written_again_are_the_same(
    server: QdrantServer, tmp_path: Path, source: Path
) -> None:
    out, place = tmp_path / "out", into(server, distance="dot")
    summary, status = embed(source, out, format="none", vectors="float16", **place)
    assert (status, summary.rows_out, summary.output_bytes) == (0, ROWS, 0)
    assert list(out.glob("*.parquet")) == []
    texts = server.collections["texts"]
    assert texts.vectors == {"size": 8, "distance": "Dot", "datatype": "float16"}
    ids = set(texts.points)
    assert ids == {str(uuid.uuid5(uuid.NAMESPACE_URL, f"{source}#{row}")) for row in range(ROWS)}
    assert embed(source, out, format="none", vectors="float16", **place)[0].shards_of_this_run == 0
    embed(source, out, format="none", vectors="float16", redo=True, **place)
    assert (set(texts.points), set(texts.upserts.values())) == (ids, {2})


def test_a_window_of_many_rows_is_several_upserts(
    server: QdrantServer, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.corpus.points._MOST_BODY_BYTES", 6200)
    summary, _ = embed(source, tmp_path / "out", id_column="id", **into(server) | {"shard_rows": ROWS})
    assert summary.reason == ""
    assert len([line for line in server.asked if "/points" in line]) == ROWS // 10
    check(server.collections["texts"], ROWS)


def test_rejected_rows_are_no_points(server: QdrantServer, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"text": ["a", None, "b" * 9999, "c"]})
    summary, _ = embed(source, tmp_path / "out", **into(server))
    found = [payload["row"] for _, payload in server.collections["texts"].points.values()]
    assert (summary.rejected, sorted(found)) == (2, [0, 3])


@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        ({"size": 9, "distance": "Cosine"}, "is of 9 values and Cosine; these vectors have 8, and Cosine is"),
        ({"size": 8, "distance": "Dot"}, "is of 8 values and Dot; these vectors have 8, and Cosine is"),
        ({"title": {"size": 8, "distance": "Cosine"}}, "has 'title'; one vector without a name is wanted"),
    ],
    ids=["size", "distance", "names"],
)
def test_another_collection_is_refused(
    server: QdrantServer, tmp_path: Path, source: Path, vectors: dict[str, object], says: str
) -> None:
    server.collections["texts"] = Collection(vectors)
    summary, status = embed(source, tmp_path / "out", **into(server, distance="cosine"))
    assert (status, summary.rows_out) == (1, 0)
    assert f"collection texts at {server.url} {says}" in summary.reason
    assert "\n" not in summary.reason


def test_a_collection_of_any_distance_will_do(server: QdrantServer, tmp_path: Path, source: Path) -> None:
    server.collections["texts"] = Collection({"size": 8, "distance": "Dot", "on_disk": True})
    assert embed(source, tmp_path / "out", id_column="id", **into(server))[1] == 0
    check(server.collections["texts"], ROWS)


FAILURES = [
    (503, b""),
    (500, b'{"status": {"error": "Service internal error"}}'),
    (429, b"{}"),
    (200, b"<html>"),
    (200, b'{"result": {"operation_id": 1, "status": "wait_timeout"}, "status": "ok"}'),
]


def test_what_passes_is_waited_for(server: QdrantServer, tmp_path: Path, source: Path) -> None:
    failures = iter(FAILURES)
    server.fails = lambda path: next(failures, None) if "points" in path else None
    summary, status = embed(source, tmp_path / "out", id_column="id", **into(server))
    assert (status, summary.reason) == (0, "")
    check(server.collections["texts"], ROWS)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((503, b""), r"cannot be written: status 503; finished shards stay"),
        ((200, FAILURES[4][1]), "cannot be written: points are wait_timeout, not acknowledged; finished"),
        ((403, b'{"status": {"error": "forbidden"}}'), "cannot be used: forbidden"),
    ],
)
def test_a_shard_is_done_only_once_its_points_are(
    server: QdrantServer, tmp_path: Path, source: Path, answer: tuple[int, bytes], says: str
) -> None:
    out, upserts = tmp_path / "out", []

    def fails(path: str) -> tuple[int, bytes] | None:
        if "points" in path:
            upserts.append(path)
        return answer if len(upserts) > 3 else None

    server.fails = fails
    summary, status = embed(source, out, id_column="id", **into(server))
    assert (status, summary.balanced) == (1, True)
    assert says in summary.reason
    done = markers(out)
    assert len(done) <= 3
    assert leftovers(out) == []
    server.fails = lambda _: None
    summary, status = embed(source, out, id_column="id", **into(server))
    assert (status, summary.shards_of_this_run) == (0, SHARDS - len(done))
    check(server.collections["texts"], ROWS)


def test_a_job_without_points_is_another_job(server: QdrantServer, tmp_path: Path, source: Path) -> None:
    embed(source, tmp_path / "out", id_column="id", shard_rows=20)
    with pytest.raises(Exception, match="qdrant was not given, is 'texts'"):
        embed(source, tmp_path / "out", id_column="id", **into(server))


def test_ids_that_qdrant_takes_stay_as_they_are() -> None:
    whole = "936da01f-9abd-4d9d-80c7-02af85c822a8"
    assert [point_id("f", 0, id_) for id_ in (0, 2**64 - 1, whole)] == [0, 2**64 - 1, whole]
    others = [-1, 2**64, "17", "", whole.upper(), whole.replace("-", ""), None]
    ids = [point_id("f", 3, id_) for id_ in others]
    assert len({*ids, whole}) == len(others) + 1
    assert ids == [point_id("f", 3, id_) for id_ in others]
    assert ids[2] == str(uuid.uuid5(uuid.NAMESPACE_URL, "17"))
    assert ids[-1] == str(uuid.uuid5(uuid.NAMESPACE_URL, "f#3"))


def test_a_driver_that_is_killed_goes_on(server: QdrantServer, tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    flags = (source, out, "--id-column", "id", "--shard-rows", str(ROWS // SHARDS), "--format", "none")
    flags += ("--qdrant", server.url, "--qdrant-collection", "texts")
    with CorpusProcess(*flags, FAKE_STEP_S="0.03", QDRANT_API_KEY="secret") as process:
        process.until(lambda: len(list((out / "_corpus" / "done").glob("*"))) >= 3)
        process.signal(signal.SIGKILL)
        process.wait()
    done = markers(out)
    assert 3 <= len(done) < SHARDS
    status, summary, err = run(*flags, QDRANT_API_KEY="secret")
    assert (status, summary["shards_of_this_run"]) == (0, SHARDS - len(done)), err
    check(server.collections["texts"], ROWS)
    assert server.keys == {"secret"}
    assert not any(b"secret" in path.read_bytes() for path in out.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--qdrant", "http://q:6333"], "--qdrant and --qdrant-collection go together"),
        (["--qdrant", "q:6333", "--qdrant-collection", "c"], "--qdrant q:6333: not a URL"),
        (["--qdrant", "http://q", "--qdrant-collection", "a/b"], "'a/b' is no collection's name"),
        (["--format", "none"], "--format none: the vectors would be nowhere"),
        (["--qdrant", "http://q", "--qdrant-collection", "c", "--vectors", "bits"], "no --vectors bits"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], says: str) -> None:
    from argparse import ArgumentParser

    from gateway.corpus.flags import add_flags, corpus_options

    parser = ArgumentParser()
    add_flags(parser)
    with pytest.raises(ValueError, match=says):
        corpus_options(parser.parse_args(["in", "out", *flags]), {})
