"""What the ahead-of-time build writes is all that a start asks for; what is damaged is compiled."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.programs import COMPILED_S, compiled_by

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.timeout(COMPILED_S),
]
SCRIPT = Path(__file__).with_name("prebuild_kernels.py")


def summary(lines: list[str]) -> tuple[int, int]:
    """Variants built ahead, and others."""
    found = re.search(r"(\d+) built ahead, (\d+) compiled or cached", lines[-1])
    assert found is not None, lines
    return int(found[1]), int(found[2])


def test_a_start_compiles_nothing_but_what_was_not_built_or_is_damaged(tmp_path: Path) -> None:
    said = json.loads(compiled_by(SCRIPT, tmp_path / "aot", cache=tmp_path / "cache"))
    asked = summary(said["all"])[0]
    # Those for GPUs on which our products are not built either are built too.
    assert 10 < asked <= said["built"]
    assert said["all"] == [said["all"][-1]] and summary(said["all"]) == (asked, 0)
    assert summary(said["damaged"]) == (asked - 2, 2)
    damaged = [line for line in said["damaged"] if line.startswith("ignored")]
    assert len(damaged) == 2 and any("is not the file that it describes" in line for line in damaged)
    assert summary(said["none"]) == (0, asked)
