"""server.py over a scripted engine, as a process of its own: the whole command line without torch.

A sequence may ask for trouble by its first token id, for a slow step if it is the first of its batch.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path

from rose.batch import Engine, EngineInfo, RaggedBatch
from rose.engine_options import EngineOptions
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info

# Token ids: a step of this sequence takes a second, never ends, or kills the engine.
SLOW, HANGING, DEADLY = 101, 102, 103
# --seed of a model that takes a minute to load.
SLOW_LOAD_SEED = 104
# Every other step takes so many seconds, and a vector has so many values; by these variables.
STEP_S, DIMENSIONS = "FAKE_STEP_S", "FAKE_DIMENSIONS"


class ScriptedEngine(FakeEngine):
    """Does what the first token ids of sequences say. Keeps no record of batches: it may run for long."""

    def __init__(self, info: EngineInfo, step_s: float) -> None:
        super().__init__(info=info, service_s=lambda batch: 1.0 if batch.input_ids[0] == SLOW else step_s)
        self._steps = self._sequences = 0

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        firsts = set(batch.input_ids[batch.cu_seqlens[:-1]].tolist())
        if firsts & {HANGING, DEADLY}:
            self.hang_next()
        lazy = super().step(batch)
        self._steps += 1
        self._sequences += batch.num_seqs
        for record in (self.batches, self.captures, self.in_flight_at_launch):
            record.clear()
        if DEADLY in firsts:
            self.die("scripted death")
        return lazy

    def stats(self) -> Mapping[str, object]:
        return {"steps": self._steps, "sequences": self._sequences}


def load_engine(
    folder: Path, options: EngineOptions, *, dummy: bool, model_name: str, pickles: bool
) -> Engine:
    """Takes the place of rose.engine.load_engine."""
    if options.seed == SLOW_LOAD_SEED:
        time.sleep(60)
    dimensions = int(os.environ.get(DIMENSIONS, "8"))
    info = fake_info(dimensions=dimensions, max_batch_seqs=min(64, options.max_batch_seqs))
    return ScriptedEngine(info, float(os.environ.get(STEP_S, "0")))


if __name__ == "__main__":
    engine_module = types.ModuleType("rose.engine")
    engine_module.__dict__["load_engine"] = load_engine
    sys.modules["rose.engine"] = engine_module
    import server

    server.known = lambda folder: {"model": "fake"}  # not what the folder's files say

    sys.exit(server.main())
