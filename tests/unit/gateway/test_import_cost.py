"""Importing the gateway is cheap and brings no torch."""

from __future__ import annotations

from tests.programs import output_of

MAX_CPU_S = 0.7
SCRIPT = """
import sys, time
started_s = time.process_time()
import gateway.app, gateway.listener, gateway.tokenization.huggingface, scheduler.batcher
print(time.process_time() - started_s, "torch" in sys.modules)
"""


def test_import_of_the_gateway() -> None:
    """CPU seconds, so that a busy machine does not fail it; 0.3 s where it was written."""
    cpu_s, torch = output_of("-c", SCRIPT).split()
    assert torch == "False"
    assert float(cpu_s) <= MAX_CPU_S
