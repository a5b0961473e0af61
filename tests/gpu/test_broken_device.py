"""An engine whose device breaks or hangs, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys, time, torch, numpy as np
from pathlib import Path
from rose.batch import RaggedBatch
from rose.engine import EngineOptions, load_engine
from rose.errors import EngineDeadError
options = EngineOptions(device="cuda", max_batch_tokens=512, max_capture_tokens=256)
engine = load_engine(Path(sys.argv[1]), options, dummy=True, model_name="m")
batch = RaggedBatch.pack([np.arange(100, dtype=np.int32)])
for _ in range(3):
    engine.step(batch).result()
if sys.argv[2] == "assert":
    torch._assert_async(torch.zeros(1, device="cuda"))
else:
    torch.cuda._sleep(1 << 40)
lazies = []
try:
    lazies = [engine.step(batch) for _ in range(2)]
except EngineDeadError:
    print("dead")
if sys.argv[2] == "hang":
    time.sleep(1)
    print("hangs" if not any(lazy.done for lazy in lazies) else "done", flush=True)
    os._exit(0)
for lazy in lazies:
    try:
        lazy.result()
    except EngineDeadError as error:
        print("dead", error)
try:
    engine.step(batch)
except EngineDeadError:
    print("stays dead")
engine.close()
print("closed", flush=True)
os._exit(0)  # a broken or busy context would fail or hang the interpreter's own end
"""


@pytest.mark.parametrize("fault", ["assert", "hang"])
def test_a_broken_device_kills_the_engine_and_a_hung_one_answers_that_it_runs(fault: str) -> None:
    """How long a step may take is the scheduler's to say; it must be able to ask, whatever happens."""
    folder = ROOT / "rose" / "presets" / "minilm"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), fault],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    lines = done.stdout.splitlines()
    if fault == "hang":
        assert lines == ["hangs"], done.stderr[-2000:]
        return
    assert lines[-2:] == ["stays dead", "closed"], done.stderr[-2000:]
    assert lines[0].startswith("dead")
