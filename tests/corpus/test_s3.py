"""Corpora in a real object store: jobs from a bucket to a bucket, that are killed, refused and run again."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.corpus import lock
from gateway.corpus.capacity import WRITES_BESIDE, writes
from gateway.corpus.errors import CorpusError
from gateway.corpus.store import Store
from rose.errors import EngineDeadError
from tests.corpus.jobs import check_complete, embed, fake_model, markers, unmarked, write_texts
from tests.corpus.processes import CorpusProcess, run
from tests.corpus.s3_server import KEYS, S3Server, put, s3_server
from tests.fakes import FakeEngine

# A server in Python takes seconds to start, and on a busy machine pyarrow asks it again and again.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ROWS, SHARDS = 60, 6


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
        yield found


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One with texts in /in."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lock, "_SETTLE_S", 0.0)
    url = server.bucket()
    half = ROWS // 2
    for first in (0, half):
        path = write_texts(tmp_path / "in.parquet", half, first=first, row_group_size=ROWS // SHARDS)
        put(f"{url}/in/{first}.parquet", path.read_bytes())
    server.asked.clear()
    yield url
    server.fails = lambda _: False


SETTINGS = {"id_column": "id", "shard_rows": ROWS // SHARDS}
FLAGS = ("--id-column", "id", "--shard-rows", str(ROWS // SHARDS))


def test_from_a_bucket_to_a_bucket(server: S3Server, bucket: str) -> None:
    summary, status = embed(f"{bucket}/in/", f"{bucket}/out/", **SETTINGS)
    assert (status, summary.rows_out, summary.shards_done) == (0, ROWS, SHARDS)
    check_complete(f"{bucket}/out", ROWS)
    puts = [line.rpartition("/")[2] for line in server.asked if line.startswith("PUT ")]
    assert len(puts) == 2 * SHARDS + 6, "more requests than there are files"
    for index in range(SHARDS):
        assert puts.index(f"part-{index:06d}.parquet") < puts.index(f"{index:06d}.json")
    assert unmarked(f"{bucket}/out") == []
    assert Store(f"{bucket}/out").read("_corpus/lock.json") is None
    assert embed(f"{bucket}/in", f"{bucket}/out", **SETTINGS)[0].shards_of_this_run == 0


def test_an_endpoint_in_the_url(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in server.variables:
        monkeypatch.delenv(name)
    query = f"?endpoint_override={server.url}&region=us-east-1"
    whole = bucket.replace("://", f"://{KEYS['AWS_ACCESS_KEY_ID']}:{KEYS['AWS_SECRET_ACCESS_KEY']}@")
    summary, status = embed(f"{whole}/in/*0.parquet{query}", f"{whole}/out{query}", **SETTINGS)
    assert (status, summary.files, summary.rows_out) == (0, 2, ROWS)
    with pytest.raises(CorpusError, match=r"^s3://key:\*\*\*@bucket\d+/none: no such file") as refused:
        embed(f"{whole}/none{query}", f"{whole}/out{query}")
    assert "secret" not in str(refused.value)
    with pytest.raises(CorpusError, match=r"/in cannot be opened: Unexpected query parameter.*'nosuch'"):
        embed(f"{whole}/in?nosuch=1", f"{whole}/out{query}")


def test_a_bucket_that_is_not_there_is_said(bucket: str) -> None:
    with pytest.raises(CorpusError, match=r"lock\.json cannot be written: .*does not exist"):
        embed(f"{bucket}/in", "s3://elsewhere/out")
    with pytest.raises(CorpusError, match="s3://elsewhere/in: no such file"):
        embed("s3://elsewhere/in", f"{bucket}/out")


def test_half_a_part_is_not_left_there(bucket: str) -> None:
    class Dying(FakeEngine):
        def step(self, batch):  # type: ignore[no-untyped-def]
            if len(self.batches) > 6:
                self.die()
                raise EngineDeadError("gone")
            return super().step(batch)

    out = f"{bucket}/out"
    assert embed(f"{bucket}/in", out, fake_model(Dying()), window_rows=7, **SETTINGS)[1] == 3
    assert 0 < len(markers(out)) < SHARDS
    assert unmarked(out) == []
    assert embed(f"{bucket}/in", out, window_rows=7, **SETTINGS)[1] == 0
    check_complete(out, ROWS)


@pytest.mark.parametrize("what", ["part-000003.parquet", "done/000003.json"])
def test_a_store_that_fails_ends_the_job_and_a_rerun_completes_it(
    server: S3Server, bucket: str, what: str
) -> None:
    out = f"{bucket}/out"
    server.fails = lambda line: line.startswith("PUT ") and line.endswith(what)
    summary, status = embed(f"{bucket}/in", out, **SETTINGS)
    assert (status, summary.balanced) == (1, True)
    assert f"{what} cannot be written: " in summary.reason
    assert server.asked.count(f"PUT /{out.removeprefix('s3://')}/{what.replace('done', '_corpus/done')}") > 1
    done = markers(out)
    assert 3 not in done
    server.fails = lambda _: False
    assert embed(f"{bucket}/in", out, **SETTINGS)[0].shards_of_this_run == SHARDS - len(done)
    assert markers(out).items() >= done.items()
    check_complete(out, ROWS)


def test_a_driver_that_is_killed_holds_nobody_up(server: S3Server, bucket: str) -> None:
    flags = (f"{bucket}/in", f"{bucket}/out", *FLAGS)
    out = f"{bucket}/out"
    with CorpusProcess(*flags, FAKE_STEP_S="0.5", **server.variables) as process:
        marked = re.compile(r"PUT .*/done/\d+\.json")
        process.until(lambda: len([*filter(marked.search, server.asked)]) >= 2)
        with pytest.raises(CorpusError, match=f"out is being written by process {process.pid} on "):
            embed(f"{bucket}/in", out, **SETTINGS)
        process.signal(signal.SIGKILL)
        process.wait()
    done = markers(out)
    assert 2 <= len(done) < SHARDS
    status, summary, err = run(*flags, **server.variables)
    assert (status, summary["shards_of_this_run"]) == (0, SHARDS - len(done)), err
    assert markers(out).items() >= done.items()
    check_complete(out, ROWS)


@pytest.mark.parametrize(("nbytes", "most"), [(9 << 20, 1), (21 << 20, 3)])
def test_a_larger_file_is_uploaded_in_parts(server: S3Server, bucket: str, nbytes: int, most: int) -> None:
    """As gateway/corpus/capacity.py counts them; a server that is slow to answer may be asked again."""
    with Store(f"{bucket}/out").writing("large") as stream:
        for _ in range(nbytes >> 20):
            stream.write(bytes(1 << 20))
    asked = [line.partition(" ")[0] for line in server.asked if line.endswith("/out/large")]
    assert asked.count("PUT") >= most == writes(nbytes) - WRITES_BESIDE - 2 * ("POST" in asked)
    assert ("POST" in asked) == (most > 1)
