"""Programs in a Python of their own: what they import, compile and leave behind is theirs alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILED_S = 300.0  # others may have the cores
ROOT = Path(__file__).resolve().parent.parent


def output_of(*command: str | Path, timeout_s: float = 60.0, **variables: str | None) -> str:
    """What `python COMMAND` prints, run in the checkout and to a good end.

    variables: of its environment, beside those of this process; None: it has no such variable.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *command],
        env={name: value for name, value in environment.items() if value is not None},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled_by(script: Path, *arguments: str | Path, cache: Path) -> str:
    """What a script prints in which Triton compiles, into `cache`, as it does beside a GPU.

    Takes 10 to 20 s of a core. Tests that call it may take COMPILED_S.
    """
    variables = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(cache)}
    return output_of(script, *arguments, timeout_s=COMPILED_S - 10.0, **variables)
