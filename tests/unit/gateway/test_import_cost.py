"""Importing the gateway is cheap and brings no torch."""

from __future__ import annotations

from tests.attempts import best_of, in_time
from tests.programs import output_of

MAX_CPU_S = 0.7
SCRIPT = """
import sys, time
started_s = time.process_time()
import gateway.app, gateway.listener, gateway.tokenization.huggingface, scheduler.batcher
print(time.process_time() - started_s, "torch" in sys.modules)
"""


@best_of(3)
def test_import_of_the_gateway() -> None:
    """CPU seconds, which a busy machine makes more of, too; 0.3 to 0.5 s where nothing else ran."""
    cpu_s, torch = output_of("-c", SCRIPT).split()
    assert torch == "False"
    in_time(float(cpu_s) <= MAX_CPU_S, cpu_s)
