"""A table that a tuner wrote is the one that a server reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.kernels import fused, gemm
from rose.kernels.tables import read_choices, write_choices

CHOICES: list[dict[str, object]] = [{"n": 64, "kernel": None, "us": 1.5}, {"n": 8, "kernel": "a", "us": 2.0}]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_choices(path, 'NVIDIA "H200"', CHOICES)
    assert read_choices(path) == CHOICES
    assert len(path.read_text().splitlines()) == 6 + len(CHOICES) - 1  # a choice a line


@pytest.mark.parametrize("path", [gemm.TABLE_PATH, fused.TABLE_PATH], ids=lambda path: path.stem)
def test_the_shipped_tables_are_as_they_would_be_written(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    write_choices(again, "NVIDIA H200", read_choices(path))
    assert again.read_text() == path.read_text()
