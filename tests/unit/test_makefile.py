"""What a first `make serve` says while it installs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def made(repo_root: Path, target: str, venv: Path) -> list[str]:
    """The lines that `make TARGET` prints with an environment there."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    words = ["make", "--no-print-directory", target, f"VENV={venv}"]
    done = subprocess.run(words, cwd=repo_root, env=outer, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("target", ["install", "serve"])
def test_an_install_says_that_it_takes_minutes_and_only_the_first_one(
    repo_root: Path, tmp_path: Path, target: str
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")  # an interpreter whose pip has nothing to do
    python.chmod(0o755)
    first, second = made(repo_root, target, tmp_path), made(repo_root, target, tmp_path)
    assert first[0].startswith("Installing torch") and "minutes" in first[0]
    assert " -m pip install" in first[1]
    assert not any("nstalling" in line or " pip " in line for line in second)
