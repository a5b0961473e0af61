"""What an installed package holds beside Python: all that the code reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = {".py", ".pyc"}


@pytest.mark.parametrize("package", ["rose", "gateway"])
def test_every_file_of_a_package_is_shipped(package: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    patterns, folder = settings["package-data"][package], ROOT / package
    shipped = {path for pattern in patterns for path in folder.glob(pattern)}
    there = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in PYTHON}
    assert there - shipped == set()
