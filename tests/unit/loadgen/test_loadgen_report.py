"""Tables, comparisons, plots and files, from results that are made up here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from loadgen import compare
from loadgen.check import Check
from loadgen.conductor import StreamRun, Warmup
from loadgen.plan import LoadgenError, Pacing, Shape, Stream
from loadgen.recording import Recorder
from loadgen.report.charts import Chart, Series, charts
from loadgen.report.files import draw, write
from loadgen.report.page import page
from loadgen.report.svg import render
from loadgen.report.table import markdown
from loadgen.results import CaseResult, Results
from loadgen.summary import StreamSummary, summarise

SVG = "{http://www.w3.org/2000/svg}"


def stream(ms: float, in_flight: int = 1, pacing: Pacing = Pacing.CLOSED) -> StreamSummary:
    """1000 requests of about `ms` over 10 s."""
    recorder = Recorder()
    begun_s = np.linspace(0.0, 9.9, 1000)
    took_s = np.linspace(0.5, 1.5, 1000) * ms / 1e3
    recorder.intended.extend(begun_s)
    recorder.sent.extend(begun_s)
    recorder.done.extend(begun_s + took_s)
    recorder.request.extend([0] * 1000)
    recorder.server.extend([0.1, np.nan, ms] * 1000)
    described = Stream(Shape(1, 512, 512), in_flight=in_flight, pacing=pacing, rate=100.0)
    run = StreamRun(described, (recorder.freeze([], [1], [512]),), 0.0, 10.0, Warmup(50, 2.0, True))
    return summarise(run)


def results(*cases: CaseResult, targets: str = "A") -> Results:
    return Results(
        started="2026-01-01T00:00:00+00:00",
        command=["python -m loadgen", "all <script>"],
        machine={"cpu": "a CPU", "cores": 2},
        targets=[
            {"name": n, "url": f"http://127.0.0.1:{ord(n)}", "api": "openai", "model": "m"} for n in targets
        ],
        servers=[{} for _ in targets],
        inputs="random ids below 30000",
        left_out=[],
        cases=list(cases),
    )


def case(name: str, *streams: StreamSummary, suite: str = "concurrency", **other: object) -> CaseResult:
    given = {"number": 0, "target": "A", "tokens_per_step": 700.0, **other}
    return CaseResult(suite, name, streams=list(streams), **given)  # type: ignore[arg-type]


LEVELS = results(*(case(f"{n} in flight × 512", stream(5.0 * n**0.5, n)) for n in (1, 2, 4, 8)))


def test_milliseconds_come_first_then_rates() -> None:
    head, rule, first, *_ = markdown(LEVELS).splitlines()
    columns = "p50 | p90 | p99 | p99.9 | max ms | n | emb/s | tokens/s | 429 | errors | client CPU"
    assert head == f"| case | {columns} |"
    assert rule.count("---") == head.count("|") - 1
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:2] == ["concurrency 1 in flight × 512", "5.00"]
    assert cells[4] == "–" and cells[6] == "1000" and cells[7].startswith("100")


def test_an_open_loop_has_both_times() -> None:
    text = markdown(results(case("1×512", stream(5.0, pacing=Pacing.POISSON), suite="open")))
    assert "| open 1×512, response |" in text and "| open 1×512, service |" in text


def test_failures_and_wrong_vectors_are_loud() -> None:
    wrong = case("1×512", stream(5.0), check=Check("reference", 8, 0.2))
    text = markdown(results(wrong, case("2×512", failed="nothing listens")))
    assert (
        "1×512 **INVALID**" in text
        and "worst cosine 0.800000 of 8 vectors to reference; 0.999 is wanted" in text
    )
    assert "- FAILED: concurrency 2×512: nothing listens." in text
    assert 'class="invalid"' in page(results(wrong))


def test_ratios_pair_the_rounds() -> None:
    left, right = {0: stream(4.0), 1: stream(8.0)}, {0: stream(8.0), 1: stream(24.0)}
    p50, p99, rate = compare.ratios(left, right)
    assert p50 is not None and (p50.middle, p50.low, p50.high) == pytest.approx((2.5, 2.0, 3.0))
    assert p99 is not None and p99.middle == pytest.approx(2.5)
    assert str(p50) == "2.50× (2.00–3.00)"
    assert rate is not None and rate.middle == pytest.approx(1.0, rel=0.01)
    assert list(compare.ratios(left, {})) == [None, None, None]


def test_a_round_that_failed_pairs_with_none(tmp_path: Path) -> None:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    second = case("1×512", stream(8.0), number=1)
    for path, first in zip(paths, (case("1×512", failed="reset"), case("1×512", stream(4.0))), strict=True):
        path.write_bytes(msgspec.json.encode(results(first, second)))
    left, right = (next(iter(column.rounds.values())) for column in compare.columns_of_files(paths))
    assert [str(ratio) for ratio in compare.ratios(left, right)] == ["1.00×"] * 3


def test_files_are_set_side_by_side(tmp_path: Path) -> None:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, ms in zip(paths, (10.0, 5.0), strict=True):
        path.write_bytes(msgspec.json.encode(results(case("1×512", stream(ms)))))
    paths[1].write_bytes(msgspec.json.encode(results(case("1×512", stream(5.0)), case("9×9", stream(1.0)))))
    text = compare.table(compare.columns_of_files(paths))
    assert "| before |" in text and "| after |" in text and "| 0.50× |" in text
    assert "Only in others than before: concurrency 9×9." in text
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(LoadgenError, match=r"no\.json"):
        compare.columns_of_files([tmp_path / "no.json"])


def test_the_knee_is_where_more_load_starts_to_buy_waiting() -> None:
    """Throughput over latency is 20, then 31.7, then 25 and 6.5."""
    levels = [
        case(str(n), msgspec.structs.replace(stream(ms), embeddings_per_s=rate))
        for n, ms, rate in ((1, 5.0, 100.0), (2, 6.0, 190.0), (4, 10.0, 250.0), (8, 40.0, 260.0))
    ]
    chart = next(chart for chart in charts(results(*levels)) if "against throughput" in chart.title)
    p50 = next(series for series in chart.series if series.name == "p50")
    assert p50.marked is not None and p50.marked[1].startswith("knee: 190/s at 6.0")


def test_every_plot_that_has_numbers_is_there() -> None:
    assert [chart.title for chart in charts(LEVELS)] == [
        "concurrency: latency against throughput",
        "concurrency: latency by percentile",
        "p99 over time",
        "tokens per batch",
    ]
    assert charts(results(case("1", failed="x"))) == []


def test_a_plot_is_xml_and_its_lines_are_where_the_numbers_say() -> None:
    chart = Chart("<t>", "x", "y", (Series("a & b", ((0.0, 10.0), (50.0, 20.0), (100.0, 10.0))),))
    text = render(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    drawn = ElementTree.fromstring(text)
    line = drawn.find(f"{SVG}polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points[0][1] == points[2][1] > points[1][1], "up is more"
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)
    assert next(e.text for e in drawn.iter(f"{SVG}text")) == "<t>"


@pytest.mark.parametrize("log", [False, True])
def test_a_plot_of_one_point_is_drawn(log: bool) -> None:
    chart = Chart("t", "x", "y", (Series("a", ((5.0, 5.0),)),), log_x=log, log_y=log)
    assert "nan" not in render(chart)


def test_the_page_needs_nothing_beside_itself() -> None:
    text = page(LEVELS)
    assert text.count("<svg") == 4 and "<table>" in text
    assert not re.findall(r"(?:src|href|url|@import|<script|<link)[=( ]", text)
    assert "all &lt;script&gt;" in text


def test_every_file_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new"
    names = {path.name for path in [*write(LEVELS, folder), *draw(LEVELS, folder)]}
    assert {path.name for path in folder.iterdir()} == names, "nothing half written is left"
    assert {"report.json", "report.md", "report.html", "tokens-per-batch.png"} <= names
    assert len([name for name in names if name.endswith(".hgrm")]) == 4
    assert len([name for name in names if name.endswith(".png")]) == 4
    assert (tmp_path / "new" / "p99-over-time.png").read_bytes().startswith(b"\x89PNG")
    assert compare.read(tmp_path / "new" / "report.json") == LEVELS


def test_without_matplotlib_only_the_pngs_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    names = {path.suffix for path in [*write(LEVELS, tmp_path), *draw(LEVELS, tmp_path)]}
    assert names == {".json", ".md", ".html", ".hgrm"}
