"""What the ahead-of-time build writes is all that a start asks for; what is damaged is compiled."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
SCRIPT = Path(__file__).with_name("prebuild_kernels.py")


def summary(lines: list[str]) -> tuple[int, int]:
    """Variants built ahead, and others."""
    found = re.search(r"(\d+) built ahead, (\d+) compiled or cached", lines[-1])
    assert found is not None, lines
    return int(found[1]), int(found[2])


def test_a_start_compiles_nothing_but_what_was_not_built_or_is_damaged(repo_root: Path, tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(repo_root)}
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "aot"],
        env=environment,
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    asked = summary(said["all"])[0]
    # Those for GPUs on which our products are not built either are built too.
    assert 10 < asked <= said["built"]
    assert said["all"] == [said["all"][-1]] and summary(said["all"]) == (asked, 0)
    assert summary(said["damaged"]) == (asked - 2, 2)
    damaged = [line for line in said["damaged"] if line.startswith("ignored")]
    assert len(damaged) == 2 and any("is not the file that it describes" in line for line in damaged)
    assert summary(said["none"]) == (0, asked)
