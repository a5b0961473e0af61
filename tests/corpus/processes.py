"""The whole command as a process: over a scripted engine, to be killed, or over MiniLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.programs import ROOT

REAL = ("server.py", "corpus")
FAKE = ("-m", "tests.corpus.fake_command")


class CorpusProcess:
    """`python PROGRAM corpus FLAGS`, ended by the end of its block at the latest."""

    def __init__(
        self,
        *flags: str | Path,
        program: Sequence[str] = FAKE,
        stderr: int = subprocess.PIPE,
        **variables: str,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program, *map(str, flags)],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def until(self, happened: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait for something that the process does, or for its end."""
        ends_s = time.monotonic() + limit_s
        while not happened() and self._process.poll() is None:
            assert time.monotonic() < ends_s, "it did not happen"
            time.sleep(0.002)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, limit_s: float = 60.0) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        out, err = self._process.communicate(timeout=limit_s)
        return self._process.returncode, out, err

    def __enter__(self) -> CorpusProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def run(*flags: str | Path, limit_s: float = 60.0, **options: Any) -> tuple[int, dict[str, Any], str]:
    """Exit status, summary and stderr of a command that runs to its end."""
    with CorpusProcess(*flags, **options) as process:
        status, out, err = process.wait(limit_s)
    return status, json.loads(out) if out else {}, err
