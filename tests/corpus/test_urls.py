"""Corpora in object stores: fsspec's memory stands for them, as it has no rename and no locks."""

from __future__ import annotations

import io
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs
from pyarrow import parquet as pq

from gateway.corpus import lock
from gateway.corpus.errors import CorpusError, OutputError, RefusedError
from gateway.corpus.locations import shown, split_pattern
from gateway.corpus.lock import Holder, Lock
from gateway.corpus.store import Store
from tests.corpus.jobs import check_complete, embed, expected, leftovers, markers, write_texts
from tests.corpus.processes import CorpusProcess

NAMES = itertools.count()


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else takes a lock while these tests do."""
    monkeypatch.setattr(lock, "_SETTLE_S", 0.0)


@pytest.fixture
def bucket() -> str:
    """An empty folder of a store."""
    return f"memory://bucket{next(NAMES)}"


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


def table_bytes(columns: dict[str, object]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def test_from_a_store_to_a_store(bucket: str) -> None:
    put(f"{bucket}/in/a.parquet", table_bytes({"text": ["one", "two", None]}))
    put(f"{bucket}/in/b.jsonl", b'{"text": "three"}\n{"text": "four"}\n')
    summary, status = embed(f"{bucket}/in", f"{bucket}/out", shard_rows=2)
    assert (status, summary.rows_out, summary.rejected, summary.shards) == (0, 4, 1, 3)
    filesystem = fsspec.filesystem("memory")
    found = [
        row
        for name in sorted(filesystem.glob(f"{bucket}/out/part-*.parquet"))
        for row in pq.read_table(io.BytesIO(filesystem.cat(name))).to_pylist()
    ]
    for row, text in zip(found, ("one", "two", "three", "four"), strict=True):
        np.testing.assert_allclose(row["vector"], expected(text), atol=1e-6)
    summary, _ = embed(f"{bucket}/in", f"{bucket}/out", shard_rows=2)
    assert summary.shards_of_this_run == 0
    filesystem.rm(f"{bucket}/out/part-000001.parquet")
    summary, _ = embed(f"{bucket}/in", f"{bucket}/out", shard_rows=2)
    assert (summary.shards_of_this_run, summary.rows_out) == (1, 4)


def test_a_pattern_in_a_store(bucket: str) -> None:
    for name in ("a-1", "a-2", "b-1"):
        put(f"{bucket}/in/{name}.parquet", table_bytes({"text": [name]}))
    assert embed(f"{bucket}/in/a-*.parquet", f"{bucket}/out")[0].rows_out == 2


@pytest.mark.parametrize(
    ("url", "base", "pattern", "seen"),
    [
        ("s3://b/in?region=x", "s3://b/in?region=x", None, "s3://b/in"),
        ("s3://b/a/*.parquet?a=http://h:1", "s3://b/a?a=http://h:1", "*.parquet", "s3://b/a/*.parquet"),
        ("s3://b/part-?.parquet", "s3://b", "part-?.parquet", "s3://b/part-?.parquet"),
        ("s3://k:p%2F@b/in", "s3://k:p%2F@b/in", None, "s3://k:***@b/in"),
        ("/data/a?b=c/x", "/data", "a?b=c/x", "/data/a?b=c/x"),
    ],
)
def test_a_url_has_a_pattern_or_something_for_its_filesystem(
    url: str, base: str, pattern: str | None, seen: str
) -> None:
    assert split_pattern(url) == (base, pattern)
    assert shown(url) == seen


def test_file_urls_are_plain_files(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.parquet", 20)
    summary, status = embed(f"file://{source}", f"file://{tmp_path}/out", id_column="id")
    assert (status, summary.rows_out) == (0, 20)
    check_complete(tmp_path / "out", 20)
    assert (tmp_path / "out" / "_corpus" / "tmp").is_dir()  # written aside and renamed


def test_a_filesystem_that_only_fsspec_knows(tmp_path: Path) -> None:
    """Its drivers are killed; what they had half written is at no part's place."""
    write_texts(tmp_path / "in.parquet", 400, row_group_size=20)
    out, flags = f"local://{tmp_path}/out", ("--id-column", "id", "--shard-rows", "20")
    with CorpusProcess(f"local://{tmp_path}/in.parquet", out, *flags, FAKE_STEP_S="0.05") as process:
        process.until(lambda: len(markers(out)) >= 3)
        process.signal(signal.SIGKILL)
        process.wait()
    done = markers(out)
    names = {path.name for path in (tmp_path / "out").glob("part-*")}
    assert {f"part-{index:06d}.parquet" for index in done} <= names
    for name in names:
        pq.read_metadata(tmp_path / "out" / name)
    summary, status = embed(f"local://{tmp_path}/in.parquet", out, id_column="id", shard_rows=20)
    assert (status, summary.shards_of_this_run) == (0, 20 - len(done))
    assert markers(out).items() >= done.items()
    assert leftovers(out) == []
    check_complete(out, 400)


def test_a_killed_shard_leaves_nothing_at_its_name(bucket: str) -> None:
    store = Store(bucket)
    with pytest.raises(KeyError), store.writing("part-000000.parquet") as stream:
        stream.write(b"half")
        stream.flush()
        assert store.sizes("") == {}
        raise KeyError
    assert store.sizes("") == store.sizes("_corpus/tmp") == {}


class Late:
    """A filesystem that does not find a folder which is there by the time it asks whether it is."""

    def get_file_info(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        assert selector.allow_not_found
        raise FileNotFoundError(f"Cannot list directory {selector.base_dir!r}")


def test_a_folder_that_is_made_while_it_is_looked_for_has_nothing_yet(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.filesystem = Late()
    assert store.sizes("_corpus/done") == {}


def test_of_two_that_take_a_lock_at_once_one_goes_on(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(bucket)
    monkeypatch.setattr(lock.time, "sleep", lambda _: hold(store, run="other"))
    with pytest.raises(RefusedError, match="being written by"), Lock(store, "mine"):
        pass
    assert b'"other"' in (store.read("_corpus/lock.json") or b"")


def test_a_lock_is_renewed_through_failures_and_not_taken_back(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_RENEW_S", 0.01)
    store, calls = Store(bucket), itertools.count()
    write = store.write

    def failing(name: str, content: bytes) -> None:
        if next(calls) in (1, 2):
            raise OutputError("the network is gone")
        write(name, content)

    monkeypatch.setattr(store, "write", failing)
    with Lock(store, "mine") as held:
        until(lambda: next(calls) > 10)
        hold(store, run="other")
        held._renewing.join(5)
        assert not held._renewing.is_alive()
    assert b'"other"' in (store.read("_corpus/lock.json") or b"")


def until(happened: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 5
    while not happened():
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def hold(store: Store, **fields: object) -> None:
    """Leave the lock file of a driver."""
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "run": "r", "renewed_s": time.time()} | fields
    store.write("_corpus/lock.json", msgspec.json.encode(Holder(**holder)))  # type: ignore[arg-type]


def test_a_store_s_lock_is_refused_while_its_driver_may_live(bucket: str) -> None:
    store = Store(bucket)
    hold(store)
    with pytest.raises(RefusedError, match=f"by process {os.getpid()} on "), Lock(store, "mine"):
        pass
    hold(store, host="elsewhere", pid=1, renewed_s=time.time() - 500)
    with pytest.raises(RefusedError, match="by process 1 on elsewhere"), Lock(store, "mine"):
        pass


@pytest.mark.parametrize(
    "stale",
    [{"pid": 2**22 + 1}, {"host": "elsewhere", "renewed_s": time.time() - 601}],
    ids=["of no process", "not renewed"],
)
def test_a_store_s_stale_lock_is_taken_over(bucket: str, stale: dict[str, object]) -> None:
    store = Store(bucket)
    hold(store, **stale)
    with Lock(store, "mine"):
        content = store.read("_corpus/lock.json")
        assert msgspec.json.decode(content or b"", type=Holder).run == "mine"
    assert store.read("_corpus/lock.json") is None


def test_a_store_s_lock_is_renewed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_RENEW_S", 0.01)
    store = Store(bucket)
    with Lock(store, "mine"):
        first = store.read("_corpus/lock.json")
        until(lambda: store.read("_corpus/lock.json") != first)


def test_an_unknown_store_is_named() -> None:
    with pytest.raises(CorpusError, match="nosuch://x cannot be opened"):
        embed("nosuch://x", "memory://out")
