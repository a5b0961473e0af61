"""The table of the H200, from reports that are made up here, and the command that fills it."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from loadgen.check import Check
from loadgen.conductor import StreamRun, Warmup
from loadgen.plan import Pacing, Shape, Stream
from loadgen.recording import Recorder
from loadgen.report.files import write
from loadgen.results import CaseResult, Results
from loadgen.summary import StreamSummary, summarise
from rose.config import load_config
from rose.model_source import resolve

pytestmark = pytest.mark.timeout(120)
FINE = Check("reference", 8, 0.00012)


@pytest.fixture
def scripts(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks' folder comes last in the path: some of its files are named as packages here are.

    They take SIGTERM for themselves, which is this process's.
    """
    monkeypatch.setattr(sys, "path", [*sys.path, str(repo_root / "docs" / "benchmarks")])
    ends = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, ends)
    for name in ("h200", "h200_table", "roofline", "serving"):
        sys.modules.pop(name, None)


@pytest.fixture
def h200(scripts: None) -> ModuleType:
    import h200

    return h200


def stream(shape: Shape, ms: float, count: int = 2000, in_flight: int = 1, **other: object) -> StreamSummary:
    """`count` requests of exactly `ms`, so many at a time that `in_flight` are always under way."""
    recorder, described = Recorder(), Stream(shape, in_flight=in_flight, **other)  # type: ignore[arg-type]
    begun_s = np.arange(count) * ms / 1e3 / in_flight
    recorder.intended.extend(begun_s)
    recorder.sent.extend(begun_s)
    recorder.done.extend(begun_s + ms / 1e3)
    recorder.request.extend([0] * count)
    recorder.server.extend([np.nan] * 3 * count)
    recording = recorder.freeze([], [shape.batch], [shape.batch * shape.low])
    return summarise(StreamRun(described, (recording,), 0.0, float(begun_s[-1]) + 1e-9, Warmup(9, 1.0, True)))


def report(folder: Path, *cases: CaseResult, left_out: tuple[str, ...] = ()) -> None:
    write(
        Results(
            started="2026-01-01T00:00:00+00:00",
            command=[],
            machine={},
            targets=[{"name": "A", "url": "u", "api": "a", "model": "m"}],
            servers=[{}],
            inputs="ids",
            left_out=list(left_out),
            cases=list(cases),
        ),
        folder,
    )


def rows(text: str) -> dict[str, list[str]]:
    """Cells by case and figure, of the first table that has them."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| case"):
            case, figure, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.setdefault(f"{case} {figure}", cells)
    return found


def test_figures_stand_beside_target_baseline_floor_and_cosine(h200: ModuleType, tmp_path: Path) -> None:
    model = tmp_path / "pplx-embed"
    one, many = stream(Shape(1, 128, 128), 2.0), stream(Shape(100, 512, 512), 400.0, 40, 4)
    short = stream(Shape(1, 512, 512), 1.5, 500)
    cases = [("1×128", one), ("1×512", short)]
    report(model / "latency", *(CaseResult("latency", n, 0, "A", [s], check=FINE) for n, s in cases))
    report(model / "throughput", CaseResult("throughput", "100×512, 4 processes", 0, "A", [many]))
    text = h200.write(tmp_path, ["pplx-embed"], "abc1234")
    assert "Commit abc1234." in text and (tmp_path / "h200.md").read_text("utf-8") == text
    found = rows(text)
    # here, n, target, vLLM, times better, share of the floor, worst cosine: 881 MB of weights take 0.205 ms.
    assert found["latency 1×128 p50"] == ["2.00 ✗", "1999", "1.00", "8.96", "4.5", "10%", "0.99988"]
    assert found["latency 1×512 p50"][:3] == ["1.50 ✓", "499", "1.60"]
    assert found["latency 1×512 p99"][0] == "–", "500 answers are too few for a p99"
    here, n, _, _, better, share, cosine = found["throughput 100×512, 4 processes emb/s"]
    # 400 sequences every 400 ms, less what the start of the window lacks.
    assert 900 <= float(here.rstrip(" ✗")) <= 1000 and (n, cosine) == ("36", "–")
    # 51200 tokens take 64.7 ms at least.
    assert float(share.rstrip("%")) / 100 == pytest.approx(0.647 * float(here.rstrip(" ✗")) / 1000, rel=0.02)
    assert better == "1.0"
    assert "- pplx-embed scoring: not run" in text and found["scoring 5×512 p50"][0] == "–"


def test_wrong_vectors_have_no_figure(h200: ModuleType, tmp_path: Path) -> None:
    wrong = CaseResult(
        "latency", "1×128", 0, "A", [stream(Shape(1, 128, 128), 0.5)], check=Check("fp32", 8, 0.3)
    )
    report(tmp_path / "bge-m3" / "latency", wrong, left_out=("latency 1×4096: no time left",))
    text = h200.write(tmp_path, ["bge-m3"], "x")
    assert rows(text)["latency 1×128 p50"] == ["**INVALID**", "–", "0.85", "8.26", "–", "–", "0.70000"]
    assert "- bge-m3 latency 1×128: INVALID: worst cosine 0.700000" in text
    assert "- bge-m3 latency: latency 1×4096: no time left" in text


def test_open_loops_count_from_the_intended_start(h200: ModuleType, tmp_path: Path) -> None:
    late = stream(Shape(1, 512, 512), 4.0, pacing=Pacing.POISSON, rate=200.0)
    report(tmp_path / "bge-m3" / "open", CaseResult("open", "1×512, poisson, 50 %", 0, "A", [late]))
    cells = rows(h200.write(tmp_path, ["bge-m3"], "x"))["open 1×512, poisson, 50 % p50"]
    assert cells[0] == "4.00" and cells[5] == "–", "no floor for requests at their own times"


def test_every_row_is_of_a_case_that_is_run(h200: ModuleType) -> None:
    from h200_table import ROWS

    from loadgen.cli import _plan
    from loadgen.flags import parser

    for model, jobs in h200.JOBS.items():
        run = set()
        for job in jobs:
            argv = [job.suite, "--url", "http://127.0.0.1:1", *job.flags.split()]
            run |= {(job.name, case.name) for case in _plan(parser().parse_args(argv)).cases}
        assert {(row.job, row.case) for row in ROWS[model]} <= run


def test_the_floor_of_known_shapes(scripts: None) -> None:
    from roofline import floor_s

    pplx, base = (load_config(resolve(name, "dummy").path) for name in ("pplx-embed", "bge-base"))
    # 28 layers of 15.7 million weights, 2 bytes each, at 4.3 TB/s.
    assert floor_s(pplx, 1, 16) == pytest.approx(0.205e-3, rel=0.01)
    # 45.1 TFLOP of products and 6.0 of scores at 790 TFLOP/s.
    assert floor_s(pplx, 100, 512) == pytest.approx(64.7e-3, rel=0.01)
    # BERT-base: 85 million weights, 12 layers of 768.
    assert floor_s(base, 64, 50) == pytest.approx(
        (2 * 84.9e6 * 3200 + 12 * 64 * 4 * 2500 * 768) / 790e12, rel=0.01
    )


def test_figures_of_two_commits_are_not_mixed(h200: ModuleType, tmp_path: Path) -> None:
    assert h200.commit_of(tmp_path / "new", "abc") == "abc"
    with pytest.raises(SystemExit, match="has figures of commit abc, this is def"):
        h200.commit_of(tmp_path / "new", "def")


def test_it_measures_and_goes_on(
    h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A small model on the CPU in place of BGE-M3 on a GPU; the second call has nothing left to do."""
    import h200_table

    # Three processes share two cores; threads that spin for each other would take longest.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = "--lengths 8 --duration 1 --warmup 0.1 --max-warmup 0.3 --no-overhead"
    jobs = (h200.Job("latency", "latency", flags), h200.Job("late", "scoring", f"{flags} --duration 5000"))
    monkeypatch.setitem(h200.JOBS, "minilm", jobs)
    row = h200_table.Row
    wanted = row("latency", "1×8", "emb/s"), row("late", "5×8", "p50")
    monkeypatch.setitem(h200_table.ROWS, "minilm", wanted)
    argv = [
        "--out",
        str(tmp_path),
        "--model",
        "minilm",
        "--device",
        "cpu",
        "--budget-s",
        "600",
        "--commit",
        "c",
    ]
    h200.main(argv)
    printed = capfd.readouterr()
    # No quantile: in a second a busy machine gives too few answers for one.
    assert re.search(r"\[1/1\] latency 1×8 A: .* emb/s; check ok: worst cosine (1\.0|0\.9999)", printed.err)
    cells = rows(printed.out)["latency 1×8 emb/s"]
    assert float(cells[0]) > 0 and cells[6].startswith(("1.0", "0.9999"))
    assert "- minilm late: scoring 5×8: no time left" in printed.out
    h200.main([*argv, "--no-check"])
    again = capfd.readouterr()
    assert rows(again.out)["latency 1×8 emb/s"] == cells and "emb/s" in again.err
