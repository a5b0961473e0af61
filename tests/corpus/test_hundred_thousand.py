"""A hundred thousand short rows through MiniLM by the command itself, killed once on the way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.corpus.jobs import markers, parts, write_parquet
from tests.corpus.processes import REAL, CorpusProcess, run

ROWS = 100_000


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_rows(tmp_path: Path, minilm_folder: Path) -> None:
    texts = [f"row {number % 977} of {number}" for number in range(ROWS)]
    columns = {"id": list(range(ROWS)), "text": texts}
    source = write_parquet(tmp_path / "in.parquet", columns, row_group_size=10_000)
    out = tmp_path / "out"
    given = (
        source,
        out,
        "--id-column",
        "id",
        "--shard-rows",
        "10000",
        "--device",
        "cpu",
        "--vectors",
        "int8",
    )
    with CorpusProcess(*given, program=REAL) as process:
        process.until(lambda: len(list((out / "_corpus" / "done").glob("*"))) >= 3, 900)
        process.signal(signal.SIGKILL)
        process.wait()
    before = markers(out)
    status, summary, _ = run(*given, program=REAL, limit_s=900)
    assert (status, summary["rows_out"], summary["duplicate_ids"]) == (0, ROWS, 0)
    assert summary["shards_of_this_run"] == 10 - len(before)
    assert markers(out).items() >= before.items()
    assert sorted(parts(out).column("id").to_pylist()) == list(range(ROWS))
    print(f"{summary['rows_per_s']} rows/s")
