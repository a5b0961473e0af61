"""The scripted server, as a GPU's: shapes are cold, warmed and captured as the real `GraphRunner` decides it.

FAKE_TASK=score: it scores pairs instead.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rose.batch import Engine, EngineInfo, RaggedBatch
from rose.buckets import sequence_bucket, token_bucket
from rose.engine_options import EngineOptions
from rose.graph_runner import Graph, GraphKey, GraphLimits, GraphRunner
from tests.e2e.fake_server import DIMENSIONS, STEP_S, ScriptedEngine
from tests.fakes import FakeLazyTensor, fake_info

TASK = "FAKE_TASK"
MOST_TOKENS = 1024


class NoGraph:
    """A captured forward of nothing."""

    nbytes = 1 << 20

    def launch(self) -> None:
        pass

    def close(self) -> None:
        pass


class NoDevice:
    """Captures all but the largest batches of few sequences, so that every state is there."""

    def run(self, key: GraphKey, work: None) -> None:
        pass

    def capture(self, key: GraphKey, work: None) -> Graph:
        return NoGraph()

    def capturable(self, key: GraphKey) -> bool:
        return key.num_seqs > 1 or key.num_tokens < MOST_TOKENS


class GraphedEngine(ScriptedEngine):
    """Counts the tokens of its steps, too."""

    def __init__(self, info: EngineInfo, step_s: float) -> None:
        super().__init__(info, step_s)
        limits = GraphLimits("lazy", MOST_TOKENS, 512, 1 << 40)
        self._runner: GraphRunner[None] = GraphRunner(NoDevice(), limits)

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        key = GraphKey(token_bucket(batch.num_tokens), sequence_bucket(batch.num_seqs), "fake")
        self._runner.run(self._runner.entry(key), None)
        return super().step(batch)

    def stats(self) -> Mapping[str, object]:
        buckets = self._runner.buckets(self.info.max_batch_tokens, self.info.max_batch_seqs)
        return {**super().stats(), "graphs": {**self._runner.stats(), **buckets}}


def load_engine(
    folder: Path, options: EngineOptions, *, dummy: bool, model_name: str, pickles: bool
) -> Engine:
    """Takes the place of rose.engine.load_engine."""
    scores = os.environ.get(TASK) == "score"
    dimensions = 1 if scores else int(os.environ.get(DIMENSIONS, "8"))
    info = replace(fake_info(dimensions=dimensions), model=model_name, device="cuda:0", dtype="bfloat16")
    if scores:
        info = replace(info, task="score", labels=("LABEL_0",))
    return GraphedEngine(info, float(os.environ.get(STEP_S, "0")))


if __name__ == "__main__":
    engine_module = types.ModuleType("rose.engine")
    engine_module.__dict__["load_engine"] = load_engine
    sys.modules["rose.engine"] = engine_module
    import server

    sys.exit(server.main())
