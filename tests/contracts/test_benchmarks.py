"""Benchmarks that need no GPU run to their end; what they say of time is not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("gateway.py --seconds 0.1 --warmup 0.1 --in-flight 2", ["json text -> base64", "64 x 50 ids"]),
        ("scheduler.py --requests 1024", ["clients=256", "open rate=4000/s"]),
        ("overhead.py --rounds 8 --no-http", ["100x512", "GraphEngine.step, cold"]),
        (
            "tail.py --model minilm --batch 3x16 --rounds 20 -- --device cpu",
            ["polling client", "98% to 100%"],
        ),
    ],
    ids=["gateway", "scheduler", "overhead", "tail"],
)
def test_it_measures_all_that_it_says(repo_root: Path, command: str, words: list[str]) -> None:
    script, *flags = command.split()
    run = subprocess.run(
        [sys.executable, str(repo_root / "docs" / "benchmarks" / script), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    assert all(word in run.stdout for word in words), run.stdout
