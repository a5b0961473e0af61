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


def write(results: Results, folder: Path) -> list[Path]:
    """report.json, report.md, report.html, a .hgrm for each distribution, a .png for each plot.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.md": markdown(results), "report.html": page(results), **_hgrms(results)}
    texts["report.json"] = msgspec.json.format(msgspec.json.encode(results), indent=1).decode()
    paths = []
    for name, text in texts.items():
        paths.append(folder / name)
        paths[-1].write_text(text, "utf-8")
    for chart in charts(results):
        path = folder / f"{_slug(chart.title)}.png"
        if png.write(chart, path):
            paths.append(path)
    return paths


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
