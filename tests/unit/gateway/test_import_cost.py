"""Importing the gateway is cheap and brings no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_CPU_S = 0.7
SCRIPT = """
import sys, time
started_s = time.process_time()
import gateway.app, gateway.listener, gateway.tokenization.huggingface, scheduler.batcher
print(time.process_time() - started_s, "torch" in sys.modules)
"""


def test_import_of_the_gateway(repo_root: Path) -> None:
    """CPU seconds, so that a busy machine does not fail it; 0.3 s where it was written."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=repo_root, capture_output=True, text=True, check=True, timeout=60
    )
    cpu_s, torch = run.stdout.split()
    assert torch == "False"
    assert float(cpu_s) <= MAX_CPU_S
