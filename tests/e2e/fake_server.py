"""server.py over a scripted engine, as a process of its own: the whole command line without torch.

A sequence may ask for trouble by its first token id.
"""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

from rose.batch import Engine, EngineInfo, RaggedBatch
from rose.engine_options import EngineOptions
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info

# Token ids: a step of this sequence takes a second, never ends, or kills the engine.
SLOW, HANGING, DEADLY = 101, 102, 103
# --seed of a model that takes a minute to load.
SLOW_LOAD_SEED = 104


class ScriptedEngine(FakeEngine):
    """Does what the first token id of a batch's first sequence says."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info=info, service_s=lambda batch: 1.0 if batch.input_ids[0] == SLOW else 0.0)

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        if batch.input_ids[0] in (HANGING, DEADLY):
            self.hang_next()
        lazy = super().step(batch)
        if batch.input_ids[0] == DEADLY:
            self.die("scripted death")
        return lazy


def load_engine(folder: Path, options: EngineOptions, *, dummy: bool, model_name: str) -> Engine:
    """Takes the place of rose.engine.load_engine."""
    if options.seed == SLOW_LOAD_SEED:
        time.sleep(60)
    return ScriptedEngine(fake_info())


if __name__ == "__main__":
    engine_module = types.ModuleType("rose.engine")
    engine_module.__dict__["load_engine"] = load_engine
    sys.modules["rose.engine"] = engine_module
    import server

    sys.exit(server.main())
