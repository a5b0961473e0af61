"""The report's files, all in one folder."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from loadgen.histogram import hgrm
from loadgen.report import png
from loadgen.report.charts import charts
from loadgen.report.page import page
from loadgen.report.table import label, markdown
from loadgen.results import Results


def save(results: Results, path: Path) -> None:
    """Write the JSON in one piece: whoever reads or resumes finds the old file or the new one, never half.

    Raises:
        OSError: the file cannot be written.
    """
    _replace(path, msgspec.json.format(msgspec.json.encode(results), indent=1))


def write(results: Results, folder: Path) -> list[Path]:
    """report.json, report.md, report.html and a .hgrm for each distribution.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.md": markdown(results), "report.html": page(results), **_hgrms(results)}
    for name, text in texts.items():
        _replace(folder / name, text.encode())
    save(results, folder / "report.json")
    return [folder / name for name in (*texts, "report.json")]


def draw(results: Results, folder: Path) -> list[Path]:
    """A .png for each plot, if matplotlib is there; takes a second, so once a run and not once a case."""
    paths = [(chart, folder / f"{_slug(chart.title)}.png") for chart in charts(results)]
    return [path for chart, path in paths if png.write(chart, path)]


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _hgrms(results: Results) -> dict[str, str]:
    files = {}
    for case in results.cases:
        for stream in case.streams:
            for kind, distribution in stream.distributions.items():
                mean = (stream.response if kind == "response" else stream.service).mean
                suffix = f" {kind}" if len(stream.distributions) > 1 else ""
                name = _slug(label(case, stream, results) + suffix)
                files[f"{name}.hgrm"] = hgrm(distribution.curve, mean, distribution.stdev)
    return files


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower().replace("×", "x").replace("%", "percent")).strip("-")
