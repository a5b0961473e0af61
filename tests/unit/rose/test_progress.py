"""Bars as a person at a terminal sees them, and as a log does: not at all."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from tests.unit.rose.loopback_hub import Hub
from tests.unit.rose.test_hub import hub as hub

ROOT = Path(__file__).resolve().parents[3]
# Each of them is quick here, and so would show nothing.
PROGRAM = """
from dataclasses import replace
from rose import progress
progress.DELAY_S = 0

from rose.model_source import resolve
resolve("org/name")

from rose.engine import load_engine
from rose.engine_options import EngineOptions
folder = resolve("minilm", "safetensors")
load_engine(folder.path, EngineOptions(device="cpu"), dummy=False, model_name="minilm").close()

from tests.unit.rose.test_graph_runner import LIMITS, FakeDevice, GraphRunner, key_of
device = FakeDevice()
runner = GraphRunner(device, replace(LIMITS, mode="all"))
runner.capture_all([key_of(64 * n) for n in (5, 4, 3)], lambda key: device.staged)

from gateway.corpus.bar import Bar as CorpusBar
with CorpusBar(2400, 0, 1) as bar:
    bar.advance(1200, 5000)

from loadgen.progress import Bar as SuiteBar
with SuiteBar(2) as bar:
    bar.begin("a case")
    bar.at(0.5)
"""
# In the order of the program; the last two rooms have bars of their own, as they may not import rose.
SEEN = (
    r"Fetching 5 files[^\r]* \d+%\|",
    r"loading weights[^\r]* \d+%\|",
    r"capturing CUDA graphs[^\r]* \d+%\|",
    r"[^\r]* 50%\|[^\r]*\| 1,200/2,400 \[[^\r]* rows/s, [^\r]*tokens/s a worker",
    r"a case +\|[^\r]*\| 0\.5/2 ",
)


def at_a_terminal(env: dict[str, str]) -> str:
    """All that the program writes to the terminal that its stderr is."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                written.append(os.read(ours, 65536))
            except OSError:  # how Linux says that nobody holds the other end any more
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "wb") as terminal:
        done = run(env, terminal.fileno())
    reader.join(10)
    os.close(ours)
    assert done.returncode == 0, written
    return b"".join(written).decode()


def run(env: dict[str, str], stderr: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.usefixtures("minilm_folder")
def test_a_terminal_is_shown_how_far_things_are_and_a_file_is_not(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "one"), "HF_HUB_OFFLINE": "0"}
    shown = at_a_terminal(env)
    for bar in SEEN:
        assert re.search(bar, shown), (bar, shown)
    env["HF_HOME"] = str(tmp_path / "another")
    done = run(env, subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
