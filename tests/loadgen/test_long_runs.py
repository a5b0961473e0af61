"""Runs that end before their time, and that go on later: what was measured is kept, what was not is named."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen import compare, suites
from loadgen.cli import main
from loadgen.results import Results
from tests.loadgen.stub import Script, Stub

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--quick", "--no-overhead", "--warmup", "0.1", "--max-warmup", "0.2", "--requests", "20")


def latency(folder: Path, url: str, lengths: str, *flags: str) -> tuple[int, Results]:
    """Status of a run, and the report it left."""
    status = main(["latency", *QUICK, "--url", url, "--lengths", lengths, "--report", str(folder), *flags])
    return status, compare.read(folder / "report.json")


def test_a_killed_run_leaves_what_it_measured_and_is_gone_on_with(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadgen", "latency", *QUICK, "--lines", f"--report={tmp_path}"]
    with Stub() as stub:
        flags = ["--url", stub.url, "--lengths", "8,9,10,11,12"]
        with subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
            assert run.stderr is not None
            assert run.stderr.readline().startswith("[1/5] latency 1×8 A: p50 ")
            run.send_signal(signal.SIGKILL)
            assert run.wait(10) == -signal.SIGKILL
        report = compare.read(tmp_path / "report.json")
        assert report.command[-5:] == [f"--report={tmp_path.name}", *flags], "no folders of this machine"
        first = report.cases[0]
        assert first.name == "1×8" and first.streams[0].service.count >= 20
        assert {"report.md", "report.html"} <= {path.name for path in tmp_path.iterdir()}
        sent = stub.requests
        status, results = latency(tmp_path, stub.url, "8,9,10", "--resume")
        assert status == 0 and [case.name for case in results.cases] == ["1×8", "1×9", "1×10"]
        assert results.cases[0] == first and stub.requests > sent
        assert len(results.resumed) == 1 and "gone on with" in (tmp_path / "report.md").read_text("utf-8")
        sent = stub.requests
        assert latency(tmp_path, stub.url, "8,9,10", "--resume")[1].cases == results.cases
    assert stub.requests == sent, "nothing was missing, so nothing was measured"


def test_what_failed_or_was_invalid_is_measured_again(tmp_path: Path) -> None:
    with Stub(Script(wrong_after=3)) as wrong, Stub() as right:
        check = ("--check", right.url)
        assert latency(tmp_path, wrong.url, "8", *check)[0] == 1
        status, results = latency(tmp_path, right.url, "8", "--resume", *check)
    assert status == 0 and [case.valid for case in results.cases] == [True]


def test_another_run_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub() as stub:
        latency(tmp_path, stub.url, "8")
        assert latency(tmp_path, stub.url, "8", "--resume", "--vocab-size", "77")[0] == 2
    assert "sent random ids below 30000, this run random ids below 77" in capsys.readouterr().err


def test_a_run_without_resume_starts_afresh(tmp_path: Path) -> None:
    with Stub() as stub:
        latency(tmp_path, stub.url, "8")
        assert [case.name for case in latency(tmp_path, stub.url, "9")[1].cases] == ["1×9"]


@pytest.mark.timed
def test_a_budget_names_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second case could take 3 s of margin, 0.2 s of warm-up and 2 s.
    monkeypatch.setattr(suites, "QUICK", replace(suites.QUICK, max_s=1.0, min_s=0.9))
    with Stub(Script(delay_s=0.02)) as stub:
        begun_s = time.monotonic()
        status, results = latency(tmp_path, stub.url, "8,9,10,11,12", "--budget-s", "6", "--requests", "9999")
    assert time.monotonic() - begun_s < 6
    assert status == 0 and [case.name for case in results.cases][:1] == ["1×8"]
    left = [f"latency 1×{n}: no time left" for n in (8, 9, 10, 11, 12)][len(results.cases) :]
    assert left and results.left_out == left


def test_an_open_loop_goes_on_with_the_maximum_it_knows(tmp_path: Path) -> None:
    flags = ("open", *QUICK, "--arrivals", "constant", "--lengths", "8", "--report", str(tmp_path))
    with Stub(Script(delay_s=0.1)) as stub:
        assert main([*flags, "--loads", "5", "--url", stub.url, "--duration", "1"]) == 0
        maximum, first = compare.read(tmp_path / "report.json").cases
        status = main([*flags, "--loads", "5,10", "--url", stub.url, "--duration", "1", "--resume"])
    again, same, second = compare.read(tmp_path / "report.json").cases
    assert status == 0 and (again, same) == (maximum, first)
    assert second.streams[0].rate == pytest.approx(maximum.streams[0].requests_per_s / 10)


@pytest.mark.timed
def test_short_texts_say_what_the_client_reaches_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--quick", "--lengths", "50", "--batches", "16", "--in-flight", "4", "--processes", "2")
    with Stub(Script(delay_s=0.05)) as stub:
        assert main(["short", *flags, "--url", stub.url, "--json", str(tmp_path / "r.json")]) == 0
    results = compare.read(tmp_path / "r.json")
    ((stream,),) = [case.streams for case in results.cases]
    assert stream.in_flight == 8 and results.cases[0].name == "16×50, 8 in flight"
    assert stream.tokens_per_s == pytest.approx(50 * stream.embeddings_per_s)
    alone = results.alone["short 16×50, 8 in flight"]
    # 8 requests of 16 texts every 50 ms are 2560 a second; an echo takes no time.
    assert alone > 2 * stream.embeddings_per_s > 1000
    printed = capsys.readouterr().out
    assert f"client and an echo server alone reach {alone:.0f} emb/s" in printed
    assert "may be what is measured" not in printed.replace("a client used", "")
