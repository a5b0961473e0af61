"""`make test` and `make unit` run every test that `python -m pytest` runs, and each of them once."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest

# What a command may say beside the marks that it runs: no folder, and no flag that leaves tests out.
HARMLESS = argparse.ArgumentParser(allow_abbrev=False)
HARMLESS.add_argument("-p", choices=["no:cacheprovider"])
HARMLESS.add_argument("-n")
HARMLESS.add_argument("--dist")
HARMLESS.add_argument("-m", dest="marks", required=True)


@pytest.fixture(scope="module")
def configured(repo_root: Path) -> dict[str, Any]:
    """What pyproject.toml says to pytest."""
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    options: dict[str, Any] = project["tool"]["pytest"]["ini_options"]
    return options


def commands(repo_root: Path, target: str) -> list[list[str]]:
    """The arguments of each pytest that `make TARGET` would start."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.run(
        ["make", "--dry-run", target], cwd=repo_root, env=outer, capture_output=True, text=True, check=True
    ).stdout
    lines = [shlex.split(line) for line in printed.splitlines() if " -m pytest" in line]
    return [words[words.index("pytest") + 1 :] for words in lines]


def runs(expression: str, marks: dict[str, bool]) -> bool:
    """Whether a test with these marks is one of `-m EXPRESSION`, whose words are Python's."""
    return bool(eval(expression, {}, marks))


@pytest.mark.parametrize("target", ["test", "unit"])
def test_every_test_is_run_by_one_command(repo_root: Path, configured: dict[str, Any], target: str) -> None:
    words = shlex.split(configured["addopts"])
    default = words[words.index("-m") + 1]
    parts = [HARMLESS.parse_args(arguments).marks for arguments in commands(repo_root, target)]
    assert len(parts) > 1
    names = [line.partition(":")[0] for line in configured["markers"]]
    for chosen in product([False, True], repeat=len(names)):
        marks = dict(zip(names, chosen, strict=True))
        assert sum(runs(part, marks) for part in parts) == runs(default, marks), marks
