"""The driver killed or stopped at any moment: a rerun ends with every row once, each shard embedded once."""

from __future__ import annotations

import os
import random
import resource
import signal
import termios
import time
from pathlib import Path

import pytest

from tests.corpus.jobs import check_complete, leftovers, markers, rows, write_texts
from tests.corpus.processes import CorpusProcess, run

ROWS, SHARDS = 1000, 20


def flags(tmp_path: Path) -> list[str | Path]:
    source = tmp_path / "in.parquet"
    if not source.exists():
        write_texts(source, ROWS, row_group_size=ROWS // SHARDS)
    return [source, tmp_path / "out", "--id-column", "id", "--shard-rows", str(ROWS // SHARDS)]


def kill_and_rerun(tmp_path: Path, seed: int, kills: int) -> None:
    """Kill the driver after a random shard and a random while, `kills` times, then let it end.

    On a fast machine one of the later kills may find it at its end, which must change nothing either.
    """
    chance, out = random.Random(seed), tmp_path / "out"
    seen: dict[int, dict[str, object]] = {}
    for kill in range(kills):
        after = len(seen) + chance.randrange(1, SHARDS // (kills + 1))
        with CorpusProcess(*flags(tmp_path), "--window-rows", "20", FAKE_STEP_S="0.02") as process:
            process.until(lambda wanted=after: len(list((out / "_corpus" / "done").glob("*"))) >= wanted)
            time.sleep(chance.random() * 0.05)
            process.signal(signal.SIGKILL)
            process.wait()
        now = markers(out)
        assert now.items() >= seen.items(), "a shard that was done was done again"
        seen = now
        if len(now) == SHARDS:
            assert kill > 0, "it was never killed at work"
            break
    status, summary, _ = run(*flags(tmp_path), "--window-rows", "20")
    assert status == 0
    assert summary["shards_of_this_run"] == SHARDS - len(seen)
    now = markers(out)
    assert now.items() >= seen.items(), "a shard that was done was done again"
    assert len(now) == SHARDS
    assert (summary["rows_in"], summary["rows_out"], summary["duplicate_ids"]) == (ROWS, ROWS, 0)
    check_complete(out, ROWS)
    assert leftovers(out) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_driver_killed_at_random(tmp_path: Path, seed: int) -> None:
    kill_and_rerun(tmp_path, seed, kills=1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 130))
def test_a_driver_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    kill_and_rerun(tmp_path, seed, kills=4)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    out = tmp_path / "out"
    with CorpusProcess(*flags(tmp_path), FAKE_STEP_S="0.02") as process:
        process.until(lambda: len(list((out / "_corpus" / "done").glob("*"))) >= 2)
        process.signal(number)
        status, printed, err = process.wait(20)
    assert status == expected
    assert f"stopped by {number.name}" in printed
    assert "Traceback" not in err
    done = markers(out)
    assert 2 <= len(done) < SHARDS
    assert leftovers(out) == []
    status, summary, _ = run(*flags(tmp_path))
    assert (status, summary["shards_of_this_run"]) == (0, SHARDS - len(done))
    check_complete(out, ROWS)


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """Parts are of 26 kB here, and what belongs to the job of less than 8."""
    given = flags(tmp_path)
    with CorpusProcess(*given, FAKE_DIMENSIONS="128") as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
        status, printed, err = process.wait()
    assert status == 1
    assert "no room is left" in printed + err
    assert leftovers(tmp_path / "out") == []
    status, summary, _ = run(*given, FAKE_DIMENSIONS="128")
    assert (status, summary["rows_out"]) == (0, ROWS)
    assert len(rows(tmp_path / "out")) == ROWS


def test_a_terminal_has_a_bar(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    with CorpusProcess(*flags(tmp_path), stderr=theirs, FAKE_STEP_S="0.01") as process:
        os.close(theirs)
        assert process.wait()[0] == 0
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "rows/s" in shown
    assert "tokens/s a worker" in shown
    assert "100%" in shown


def test_an_out_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file, no folder")
    status, _, err = run(*flags(tmp_path))
    assert status == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_the_bar_is_for_terminals_only(tmp_path: Path) -> None:
    status, summary, err = run(*flags(tmp_path), "--summary", tmp_path / "summary.json")
    assert (status, summary["status"]) == (0, "complete")
    assert err == f"complete; {ROWS} of {ROWS} rows have a vector, 0 are rejected\n"
    assert '"rows_out": 1000' in (tmp_path / "summary.json").read_text()
