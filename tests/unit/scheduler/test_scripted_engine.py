"""The scripted engine of tests ends every step that it does not let hang."""

from __future__ import annotations

import numpy as np

from rose.batch import RaggedBatch
from tests.fakes import FakeEngine

BATCH = RaggedBatch.pack([np.array([1], np.int32)])


def test_timers_that_fire_in_another_order_end_all_steps_in_theirs() -> None:
    """A loop that loses its core while it makes a timer makes it late, and the next one in time."""
    engine = FakeEngine(service_s=None)
    steps = [engine.step(BATCH) for _ in range(3)]
    engine._finish_up_to(steps[1])
    assert not any(step.done for step in steps)
    engine._finish_up_to(steps[0])
    assert [step.done for step in steps] == [True, True, False]
    engine._finish_up_to(steps[2])
    assert steps[2].done and not engine.running and not engine._due
