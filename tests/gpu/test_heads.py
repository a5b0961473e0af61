"""Scoring heads and spans at full size in bf16 on the GPU: near the fp32 reference, right when replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.attention.backends import load_backends
from rose.batch import RaggedBatch
from rose.config import load_config
from rose.device_batch import Outputs
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from rose.heads.stages import Stage, Stages
from rose.models.registry import build_model
from rose.reference import reference_vectors
from rose.weights import DummyWeights
from tests.gpu.loaded_model import LoadedModel, nothing_allocated

pytestmark = pytest.mark.gpu

PRESETS = Path(__file__).resolve().parents[2] / "rose" / "presets"
LENGTHS = [5, 120, 33, 64, 300, 1, 200]
# Three times what bf16 is off on a CPU; logits of different texts spread over 0.07 and 1.2.
TOLERANCE = {"bert": 0.02, "qwen3": 0.08}


@dataclass(frozen=True)
class Loaded(LoadedModel):
    """A scorer, and what the reference says."""

    def assert_near(self, logits: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(logits.cpu(), expected, atol=TOLERANCE[self.config.architecture], rtol=0.0)

    def logits(self, sequences: list[np.ndarray], padded_to: int) -> torch.Tensor:
        """f32[B, L]."""
        return self.run(sequences, padded_to).vectors.cpu()

    def expected(self, sequences: list[np.ndarray]) -> torch.Tensor:
        """f32[B, 1]: the reference's pooled token, and the head spelled out."""
        pooled = reference_vectors(self.config, self.weights, sequences, device="cuda")
        size, scorer = self.config.hidden_size, self.config.scorer
        assert scorer is not None
        if scorer.kind == "tokens":
            table = self.weights.tensor("embed_tokens.weight", (self.config.vocab_size, size)).cpu()
            return (pooled @ table[scorer.true_id] - pooled @ table[scorer.false_id]).unsqueeze(1)
        dense, bias = (
            self.weights.tensor(f"classifier.dense.{part}", shape).cpu()
            for part, shape in (("weight", (size, size)), ("bias", (size,)))
        )
        out, last = (
            self.weights.tensor(f"classifier.out_proj.{part}", shape).cpu()
            for part, shape in (("weight", (1, size)), ("bias", (1,)))
        )
        return torch.tanh(pooled @ dense.T + bias) @ out.T + last


@pytest.fixture(scope="module", params=["bge-reranker", "qwen3-reranker"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    config = load_config(PRESETS / request.param)
    weights = DummyWeights(1, "cuda")
    model = build_model(config, weights, torch.bfloat16, torch.device("cuda"), 4608)
    backends = load_backends(model.attention_spec, compile_missing=False)
    yield Loaded(model, weights, next(iter(backends.values())))
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("lengths", "padded_to"), [([1], 16), ([9, 30, 2], 64), (LENGTHS, 768)])
def test_near_the_fp32_reference(loaded: Loaded, lengths: list[int], padded_to: int) -> None:
    sequences = loaded.sequences(lengths)
    loaded.assert_near(loaded.logits(sequences, padded_to), loaded.expected(sequences))


def test_scores_differ_by_more_than_the_tolerance(loaded: Loaded) -> None:
    """Else the test above could not fail."""
    spread = float(loaded.expected(loaded.sequences(LENGTHS)).std())
    assert spread > 3 * TOLERANCE[loaded.config.architecture]


def test_a_score_does_not_depend_on_its_batch(loaded: Loaded) -> None:
    sequences = loaded.sequences(LENGTHS)
    alone = torch.cat([loaded.logits([ids], 320) for ids in sequences])
    loaded.assert_near(loaded.logits(sequences, 768), alone)


def test_replays_with_other_tokens_and_offsets(loaded: Loaded) -> None:
    batches = [(320, 0, 0), (3, 5, 7), (100, 100, 120), (1, 1, 1)]
    for sequences, logits in loaded.replayed(320, batches):
        loaded.assert_near(logits, loaded.expected(sequences))


def test_stages_neither_allocate_nor_wait() -> None:
    weights = [torch.randn(shape, device="cuda") for shape in ((64, 32), (3, 64))]
    stages = Stages([Stage(weights[0], weights[0].new_ones(64), "gelu"), Stage(weights[1])])
    outputs = Outputs(torch.empty(5, 3, device="cuda"), torch.empty(5, 3, dtype=torch.int8, device="cuda"))
    with torch.inference_mode():
        stages(stages.pooled(outputs), outputs)  # makes cuBLAS's workspace
        with nothing_allocated():
            stages(stages.pooled(outputs), outputs)


@pytest.mark.parametrize("alias", ["pplx-embed-context", "minilm"])
def test_spans_are_means_of_their_tokens_eagerly_captured_and_replayed(alias: str) -> None:
    """Spans of one token each give every token's hidden state; all other spans must be means of those."""
    options = EngineOptions(device="cuda", max_model_len=128, max_batch_tokens=512, max_capture_tokens=512)
    engine = load_engine(PRESETS / alias, options, dummy=True, model_name=alias)
    rng = np.random.default_rng(0)
    lengths = [60, 100, 40]
    sequences = [rng.integers(2, engine.info.vocab_size, length, dtype=np.int32) for length in lengths]
    try:
        tokens = [np.stack([np.arange(n), np.arange(n) + 1], axis=1).astype(np.int32) for n in lengths]
        hidden = engine.step(RaggedBatch.pack(sequences, None, tokens)).result().vectors.astype(np.float64)
        for _ in range(4):
            spans = [np.sort(rng.integers(0, n + 1, (2, 2)), axis=1).astype(np.int32) for n in lengths]
            batch = RaggedBatch.pack(sequences, None, [*spans[:2], None])
            result = engine.step(batch).result()
            assert batch.spans is not None and len(result.vectors) == 5
            expected = np.stack([hidden[a:b].sum(0) / max(b - a, 1) for a, b in batch.spans.tolist()])
            assert_rows_alike(result.vectors, expected)
            if result.int8 is not None:
                assert np.abs(result.int8 - np.rint(np.tanh(result.vectors) * 127)).max() <= 1
        whole = engine.step(RaggedBatch.pack(sequences)).result().vectors
        assert_rows_alike(whole, np.stack([part.mean(0) for part in np.split(hidden, [60, 160])]))
        buckets = engine.stats()["graphs"]["buckets"]  # type: ignore[index]
        assert any(bucket["spans"] and bucket["replayed"] for bucket in buckets)
    finally:
        engine.close()


def assert_rows_alike(rows: np.ndarray, expected: np.ndarray) -> None:
    """Cosines of at least 0.999; zeros where zeros are due."""
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
    assert not rows[~expected.any(axis=1)].any()
    live = norms > 0
    assert (np.vecdot(rows, expected)[live] / norms[live]).min() >= 0.999
