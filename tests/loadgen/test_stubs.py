"""Runs against servers whose delays, refusals and mistakes are known: the numbers must say so."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen import compare, suites
from loadgen.cli import main
from loadgen.results import Results
from loadgen.summary import StreamSummary
from tests.loadgen.stub import Script, Stub

pytestmark = pytest.mark.timeout(90)
QUICK = ("--quick", "--no-overhead", "--warmup", "0.1", "--lengths", "8")


class Load:
    """Runs of the command line. status: the exit status of the last one. out: what it printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._file = folder / "results.json"
        self._capsys = capsys
        self.status = -1
        self.out = ""

    def __call__(self, suite: str, *flags: str) -> Results:
        self.status = main([suite, *QUICK, "--json", str(self._file), *flags])
        printed = self._capsys.readouterr()
        self.out = printed.out
        assert printed.err == "", "quiet when stderr is no terminal"
        return compare.read(self._file)

    def only(self, suite: str, *flags: str) -> StreamSummary:
        """The one stream of the one case of a run."""
        ((stream,),) = [case.streams for case in self(suite, *flags).cases]
        return stream


@pytest.fixture(autouse=True)
def short_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "QUICK", replace(suites.QUICK, max_warmup_s=0.3))


@pytest.fixture
def load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Load:
    return Load(tmp_path, capsys)


@pytest.mark.timed
def test_a_known_delay_is_what_is_measured(load: Load) -> None:
    with Stub(Script(delay_s=0.02)) as stub:
        stream = load.only("latency", "--url", stub.url)
    assert load.status == 0
    assert stream.service.count >= 10
    assert 20.0 <= stream.service.quantiles["p50"] < 45.0
    assert stream.service.quantiles["p50"] <= stream.service.quantiles["p99"] <= stream.service.max
    # One request at a time: rate and mean latency are each other's inverse.
    assert stream.embeddings_per_s == pytest.approx(1e3 / stream.service.mean, rel=0.15)
    assert stream.tokens_per_s == pytest.approx(8 * stream.embeddings_per_s)
    assert stream.server_ms["inference"]["p50"] == pytest.approx(20.0)
    assert stream.server_ms["queue"]["p99"] == pytest.approx(0.25)
    assert stream.warmup.requests >= 5
    assert "p99.9" in stream.service.thin and f"warm-up {stream.warmup.requests} requests" in load.out


@pytest.mark.timed
def test_four_processes_add_up(load: Load) -> None:
    with Stub(Script(delay_s=0.1)) as stub:
        stream = load.only("throughput", "--url", stub.url, "--batches", "10", "--duration", "1.5")
    assert (stream.processes, len(stream.client_cpu)) == (4, 4)
    # 400 at most; one process alone would have 100. Low, since the machine may have other work.
    assert 150 < stream.embeddings_per_s < 420


@pytest.mark.timed
def test_a_stall_of_the_server_shows_in_the_p99_of_an_open_loop(load: Load) -> None:
    """A closed loop would have sent one request into it and then gone on as if nothing had been."""
    with Stub(Script(stall_at=90, stall_s=0.2)) as stub:
        flags = ("--rate", "100", "--arrivals", "constant", "--duration", "1.5", "--url", stub.url)
        stream = load.only("open", *flags)
    assert stream.response.count == pytest.approx(150, abs=2)
    # 20 of 150 were due while it stood still, the first of them 200 ms before it went on.
    assert stream.response.quantiles["p99"] >= 150.0
    assert stream.response.quantiles["p50"] < 100.0
    assert stream.send_lag is not None and stream.rate == 100.0
    assert max(moment.p99 for moment in stream.timeline) == pytest.approx(stream.response.max, rel=0.2)
    assert ", response |" in load.out and ", service |" in load.out
    assert not any("queue grew" in warning for warning in stream.warnings), "it caught up"


def test_a_rate_that_no_server_could_serve_is_said_to_be_one(load: Load) -> None:
    with Stub(Script(stall_at=40, stall_s=1.2)) as stub:
        flags = ("--rate", "200", "--arrivals", "constant", "--duration", "1", "--url", stub.url)
        stream = load.only("open", *flags)
    assert any("queue grew" in warning for warning in stream.warnings)


@pytest.mark.timed
def test_an_open_loop_measures_the_maximum_first(load: Load) -> None:
    with Stub(Script(delay_s=0.1)) as stub:
        flags = ("--loads", "10", "--arrivals", "poisson", "--duration", "1", "--url", stub.url)
        maximum, tenth = (case.streams[0] for case in load("open", *flags).cases)
    assert maximum.in_flight == 64
    # 64 every 100 ms at most, and far more than one at a time.
    assert 160 < maximum.requests_per_s < 670
    assert tenth.rate == pytest.approx(maximum.requests_per_s / 10)
    assert tenth.response.count == pytest.approx(tenth.rate, rel=0.5)


def test_refusals_are_counted_apart(load: Load) -> None:
    with Stub(Script(refuse_every=3, delay_s=0.01)) as stub:
        stream = load.only("latency", "--url", stub.url, "--duration", "1", "--requests", "60")
    assert load.status == 0
    assert stream.rejected == pytest.approx(stream.service.count / 2, rel=0.3)
    assert stream.errors == {}
    assert any("got no vectors" in warning for warning in stream.warnings)
    # What was refused took next to no time; were it mixed in, a third would be below the delay.
    assert stream.distributions["service"].curve[0][0] >= 10.0


def test_failures_are_counted_by_kind(load: Load) -> None:
    with Stub(Script(fail_every=4, drop_every=5)) as stub:
        stream = load.only("latency", "--url", stub.url, "--duration", "1", "--requests", "60")
    assert stream.errors.pop("http 500") > 0
    assert sum(stream.errors.values()) > 0 and all(kind.startswith("connection") for kind in stream.errors)
    assert stream.rejected == 0 and stream.service.count > 0
    assert "http 500" in load.out


def test_a_request_without_an_answer_is_given_up(load: Load) -> None:
    with Stub(Script(delay_s=0.005, hang_every=30)) as stub:
        begun_s = time.monotonic()
        flags = ("--timeout", "0.5", "--duration", "1.5", "--requests", "100000", "--url", stub.url)
        stream = load.only("latency", *flags)
    assert time.monotonic() - begun_s < 30
    assert stream.errors.pop("connection: no answer in 0.5 s") >= 1
    assert not stream.errors and stream.service.max < 500.0
    assert stub.requests > 40, "the client went on with a new connection"


def test_right_vectors_pass_and_wrong_ones_make_the_run_invalid(load: Load) -> None:
    with Stub() as reference, Stub() as right, Stub(Script(wrong_after=20)) as wrong:
        check = ("--check", reference.url)
        good = load("scoring", "--url", right.url, "--batches", "5", *check)
        assert load.status == 0 and "INVALID" not in load.out
        bad = load("scoring", "--url", wrong.url, "--batches", "5", *check)
    assert load.status == 1 and "INVALID" in load.out
    assert good.cases[0].check is not None and bad.cases[0].check is not None
    assert good.cases[0].check.vectors == 8 and good.cases[0].check.deviation < 1e-6
    # Right while it warmed up, wrong from the 21st answer on: the last answers are looked at too.
    assert bad.cases[0].check.deviation > 0.1 and not bad.cases[0].valid


@pytest.mark.timed
def test_two_servers_in_turns(load: Load) -> None:
    with Stub(Script(delay_s=0.01)) as a, Stub(Script(delay_s=0.03)) as b:
        results = load("latency", "--url", a.url, "--url", b.url, "--rounds", "2", "--requests", "25")
    assert [(case.target, case.number) for case in results.cases] == [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    left, right = (next(iter(column.rounds.values())) for column in compare.columns_of_targets(results))
    p50, _, rate = compare.ratios(left, right)
    assert p50 is not None and 1.8 < p50.middle < 4.0
    assert rate is not None and 0.25 < rate.middle < 0.6
    assert "×" in load.out


@pytest.mark.timed
def test_a_trace_is_replayed_at_its_own_times(load: Load, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entries = [{"at_s": 0.1 * n, "lengths": [3, 5]} for n in range(10)] + [{"at_s": 1.0, "lengths": [7]}]
    trace.write_text("\n".join(json.dumps(entry) for entry in entries))
    with Stub() as stub:
        stream = load.only("trace", "--trace", str(trace), "--url", stub.url)
    assert stream.response.count == 11
    # Ten requests of 8 tokens, and some of the last one's 7: the window ends as soon as it is sent.
    assert 79.9 <= stream.tokens_per_s * stream.window_s <= 87.1
    assert stream.window_s == pytest.approx(1.0, abs=0.01)


def test_texts_are_counted_by_what_the_server_says(load: Load, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one two three four five six seven eight nine ten " * 20)
    with Stub(Script(delay_s=0.01)) as stub:
        flags = ("--corpus", str(corpus), "--in-flight", "2", "--url", stub.url)
        stream = load.only("concurrency", *flags)
    # 8 tokens are 6 words by the rule of thumb; the stub counts two more for each text.
    assert stream.tokens_per_s == pytest.approx(8 * stream.embeddings_per_s)
    assert "text of corpus.txt, lengths roughly" in load.out


@pytest.mark.timed
def test_mixed_streams_are_told_apart(load: Load) -> None:
    with Stub(Script(delay_s=0.01)) as stub:
        alone, beside = load(
            "mixed", "--url", stub.url, "--batches", "4", "--rate", "50", "--duration", "1"
        ).cases
    assert [stream.stream for stream in alone.streams] == ["queries"]
    assert [stream.stream for stream in beside.streams] == ["queries", "batches"]
    queries, batches = beside.streams
    assert queries.shape == "1×8–32" and batches.shape == "4×8"
    assert queries.window_s == pytest.approx(batches.window_s)
    assert batches.embeddings_per_s > queries.embeddings_per_s > 20


def test_cases_too_long_for_the_model_are_left_out(load: Load) -> None:
    info = {"limits": {"max_tokens": 100}, "model": {"vocab_size": 1234}}
    with Stub(Script(info=info)) as stub:
        results = load("latency", "--url", stub.url, "--lengths", "8,101")
    assert [case.name for case in results.cases] == ["1×8"]
    assert results.left_out == ["latency 1×101: the model takes 100 tokens"]
    assert results.inputs == "random ids below 1234" and results.servers == [info]


def test_a_client_that_dies_fails_its_case_only(load: Load) -> None:
    def kill_first_client() -> None:
        while not (children := multiprocessing.active_children()) or not stub.requests:
            time.sleep(0.01)
        children[0].kill()

    with Stub(Script(delay_s=0.01)) as stub:
        killer = threading.Thread(target=kill_first_client, daemon=True)
        killer.start()
        first, second = load("latency", "--url", stub.url, "--lengths", "8,9").cases
        killer.join(10)
    assert load.status == 1
    assert first.failed is not None and "died" in first.failed
    assert second.failed is None and second.streams[0].service.count > 0


def test_what_cannot_be_run_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with Stub() as stub:
        for flags, words in (
            (("--url", "http://192.0.2.1:80"), "not on this machine"),
            (("--url", "http://127.0.0.1:1"), "127.0.0.1:1"),
            (("--url", stub.url, "--corpus", str(tmp_path / "none")), "--corpus"),
            (("--url", stub.url, "--check", str(tmp_path)), "1_Pooling"),
        ):
            status = main(["latency", *QUICK, *flags])
            printed = capsys.readouterr()
            text = printed.err + printed.out
            assert status in (1, 2) and words in text
            assert "Traceback" not in text


def test_a_wrong_answer_ends_the_case(load: Load) -> None:
    with Stub(Script(fail_every=1)) as stub:
        (case,) = load("latency", "--url", stub.url).cases
    assert load.status == 1 and case.failed == "the server answers 500: {}"
    assert "FAILED: latency 1×8" in load.out


@pytest.mark.timed
def test_the_client_alone_costs_little(tmp_path: Path) -> None:
    """Against the echo server a round trip takes tens of microseconds; the bound is for a busy machine."""
    command = [sys.executable, "-m", "loadgen", "echo", "--port", "0"]
    echo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert echo.stdout is not None
        found = re.match(r"echo at (http://\S+)", echo.stdout.readline())
        assert found is not None
        flags = ["--quick", "--lengths", "8", "--url", found.group(1), "--json", str(tmp_path / "r.json")]
        assert main(["latency", *flags]) == 0
    finally:
        echo.kill()
        echo.wait(10)
        if echo.stdout is not None:
            echo.stdout.close()
    results = compare.read(tmp_path / "r.json")
    assert results.cases[0].streams[0].service.quantiles["p50"] < 5.0
    assert results.overhead is not None and 0.0 < results.overhead.quantiles["p50"] < 5.0
