"""The same shards on a Ray cluster of two nodes on loopback: nodes, actors and drivers may die."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpus.jobs import check_complete, leftovers, markers, rejected, rows, write_texts
from tests.corpus.processes import REAL, CorpusProcess, run
from tests.corpus.qdrant_server import qdrant_server
from tests.programs import ROOT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ROWS, SHARDS = 1000, 20


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a cluster of two nodes is, with a CPU each."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray keeps to 127.0.0.1 then, as on systems where it runs no clusters; read when it is imported.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        yield from _cluster(pytest.importorskip("ray.cluster_utils"))


def _cluster(cluster_utils: Any) -> Iterator[str]:
    node = {"num_cpus": 1, "node_ip_address": "127.0.0.1"}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def flags(tmp_path: Path, address: str) -> list[str | Path]:
    source = tmp_path / "in.parquet"
    if not source.exists():
        write_texts(source, ROWS, row_group_size=ROWS // SHARDS)
    given = [source, tmp_path / "out", "--id-column", "id", "--shard-rows", str(ROWS // SHARDS)]
    return [*given, "--ray-address", address]


def workers(out: Path) -> set[int]:
    """Processes that embedded what is done."""
    return {int(marker["worker"].partition(":")[2]) for marker in markers(out).values()}


def done(out: Path) -> int:
    return len(list((out / "_corpus" / "done").glob("*")))


def test_both_nodes_embed(tmp_path: Path, address: str) -> None:
    status, summary, err = run(*flags(tmp_path, address), FAKE_STEP_S="0.1", limit_s=120.0)
    assert status == 0, err
    assert (summary["rows_out"], summary["shards_of_this_run"], summary["workers"]) == (ROWS, SHARDS, 2)
    assert len(workers(tmp_path / "out")) == 2
    check_complete(tmp_path / "out", ROWS)


def test_both_nodes_write_one_table_and_one_collection(tmp_path: Path, address: str) -> None:
    lance = pytest.importorskip("lance")
    with qdrant_server() as server:
        more = ("--format", "lance", "--qdrant", server.url, "--qdrant-collection", "texts")
        status, summary, err = run(*flags(tmp_path, address), *more, FAKE_STEP_S="0.1", limit_s=120.0)
        assert (status, summary.get("rows_out")) == (0, ROWS), err
        points = server.collections["texts"].points
    assert len(workers(tmp_path / "out")) == 2
    rows = lance.dataset(tmp_path / "out" / "vectors.lance").to_table().to_pylist()
    assert [row["id"] for row in rows] == list(range(ROWS)) == sorted(points)
    for row in rows:
        np.testing.assert_array_equal(np.float32(points[row["id"]][0]), np.float32(row["vector"]))


def test_an_actor_that_is_killed_costs_no_row(tmp_path: Path, address: str) -> None:
    out = tmp_path / "out"
    with CorpusProcess(*flags(tmp_path, address), FAKE_STEP_S="0.3") as process:
        process.until(lambda: len(workers(out)) == 2, 120.0)
        victim = min(workers(out))
        before = markers(out)
        os.kill(victim, signal.SIGKILL)
        status, printed, err = process.wait(120.0)
    assert status == 0, err
    summary = json.loads(printed)
    assert (summary["rows_out"], summary["shards_of_this_run"], summary["duplicate_ids"]) == (ROWS, SHARDS, 0)
    assert markers(out).items() >= before.items(), "a shard that was done was done again"
    check_complete(out, ROWS)


@pytest.mark.parametrize("seed", range(2))
def test_a_driver_that_is_killed_goes_on_where_it_was(tmp_path: Path, address: str, seed: int) -> None:
    chance, out = random.Random(seed), tmp_path / "out"
    with CorpusProcess(*flags(tmp_path, address), FAKE_STEP_S="0.3") as process:
        wanted = chance.randrange(1, SHARDS // 2)
        process.until(lambda: done(out) >= wanted, 120.0)
        time.sleep(chance.random() * 0.3)
        process.signal(signal.SIGKILL)
        process.wait()
    status, summary, err = run(*flags(tmp_path, address), limit_s=120.0)
    assert status == 0, err
    assert (summary["rows_out"], summary["shards_done"], summary["duplicate_ids"]) == (ROWS, SHARDS, 0)
    assert 0 < summary["shards_of_this_run"] < SHARDS
    check_complete(out, ROWS)
    assert leftovers(out) == []


def test_a_signal_ends_it_cleanly(tmp_path: Path, address: str) -> None:
    out = tmp_path / "out"
    with CorpusProcess(*flags(tmp_path, address), FAKE_STEP_S="0.3") as process:
        process.until(lambda: done(out) >= 2, 120.0)
        process.signal(signal.SIGTERM)
        status, printed, err = process.wait(60.0)
    assert status == 143
    assert "Traceback" not in err
    summary = json.loads(printed)
    assert (summary["reason"], summary["rows_out"] + summary["rows_left"]) == ("stopped by SIGTERM", ROWS)


def test_what_a_worker_cannot_do_is_said(tmp_path: Path, address: str) -> None:
    status, summary, _ = run(*flags(tmp_path, address), "--dimensions", "9", limit_s=120.0)
    assert status == 1
    assert summary["reason"] == "--dimensions is 9; fake takes 1 to 8"


def test_no_cluster_is_said(tmp_path: Path, address: str) -> None:
    status, _, err = run(*flags(tmp_path, "127.0.0.1:9"), limit_s=120.0)
    assert status == 1
    assert err.splitlines()[-1].startswith("error: --ray-address 127.0.0.1:9: ")


def test_a_real_model_gives_the_same_as_without_a_cluster(
    tmp_path: Path, address: str, minilm_folder: Path
) -> None:
    source = write_texts(tmp_path / "in.parquet", 60, row_group_size=20)
    given = ("--id-column", "id", "--shard-rows", "20", "--device", "cpu", "--threads", "1")
    given += ("--max-batch-seqs", "1")
    run(source, tmp_path / "a", *given, program=REAL, limit_s=120.0)
    status, _, err = run(
        source, tmp_path / "b", *given, "--ray-address", address, program=REAL, limit_s=200.0
    )
    assert status == 0, err
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rejected(tmp_path / "b") == []
