"""The verdict on a model: a different token, a wrong vector or a NaN in any one text must turn it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.verification import TEXTS, THRESHOLDS, describe, passed, verify
from rose.batch import BatchResult, Engine, Float32, Int32, RaggedBatch
from tests.fakes import fake_info

DIMENSIONS = 8


def vector_of(ids: Int32) -> Float32:
    """Depends on every id and its place."""
    angles = np.outer(ids + 1.0, np.arange(1, DIMENSIONS + 1)) * np.arange(1, len(ids) + 1)[:, None]
    vector: Float32 = np.cos(angles).sum(0).astype(np.float32)
    return vector


class Done:
    """A LazyTensor that is done."""

    def __init__(self, vectors: Float32) -> None:
        self.done = True
        self._result = BatchResult(vectors)

    def result(self) -> BatchResult:
        return self._result


class RightEngine:
    """Gives vector_of each sequence; keeps the batches it got."""

    def __init__(self) -> None:
        self.info = fake_info(dimensions=DIMENSIONS, max_batch_seqs=4, max_batch_tokens=300)
        self.batches: list[RaggedBatch] = []

    def step(self, batch: RaggedBatch) -> Done:
        self.batches.append(batch)
        rows = np.split(batch.input_ids, batch.cu_seqlens[1:-1])
        return Done(np.stack([vector_of(row) for row in rows]))


class Characters:
    """A tokenizer of code points."""

    def encode(self, texts: Sequence[str]) -> list[Int32]:
        return [np.array([ord(character) % 500 for character in text], np.int32) for text in texts]


class RightOracle:
    def token_ids(self, text: str) -> Int32:
        return Characters().encode([text])[0]

    def vector(self, input_ids: Int32) -> Float32:
        return vector_of(input_ids)


def check(engine: object, oracle: object, tokenizer: object | None = None) -> tuple[bool, str]:
    findings = verify(TEXTS, tokenizer, engine, oracle)  # type: ignore[arg-type]
    return passed(findings, 0.99999), "\n".join(describe(findings, 0.99999))


def test_the_same_model_passes_in_ragged_batches_within_the_limits() -> None:
    engine = RightEngine()
    ok, lines = check(engine, RightOracle(), Characters())
    assert ok and lines.endswith("the same") and "worst cosine 1.0000000" in lines
    assert sum(batch.num_seqs for batch in engine.batches) == len(TEXTS) < 4 * len(engine.batches)
    assert max(batch.num_seqs for batch in engine.batches) == 4
    assert max(batch.num_tokens for batch in engine.batches) <= 300


def test_without_a_tokenizer_ids_are_made_up_and_differ() -> None:
    engine = RightEngine()
    assert check(engine, RightOracle())[0]
    ids = np.concatenate([batch.input_ids for batch in engine.batches])
    assert ids.min() >= 0 and ids.max() < engine.info.vocab_size and len(np.unique(ids)) > 50


@pytest.mark.parametrize("number", [0, 11, len(TEXTS) - 1])
@pytest.mark.parametrize("wrong", [0.2, np.nan, np.inf])
def test_one_wrong_vector_is_found_and_named(number: int, wrong: float) -> None:
    class WrongOracle(RightOracle):
        def __init__(self) -> None:
            self.calls = 0

        def vector(self, input_ids: Int32) -> Float32:
            vector = super().vector(input_ids)
            if self.calls == number:
                vector[2] += wrong
            self.calls += 1
            return vector

    ok, lines = check(RightEngine(), WrongOracle(), Characters())
    assert not ok and lines.endswith("NOT the same")
    assert repr(TEXTS[number][:40])[1:-1] in lines
    assert lines.count("cosine") == 2


def test_other_token_ids_fail_even_if_the_vectors_agree() -> None:
    class WithEnd(RightOracle):
        def token_ids(self, text: str) -> Int32:
            return np.append(super().token_ids(text), 7)

    class Short(RightEngine):
        def __init__(self) -> None:
            super().__init__()
            self.info = replace(self.info, max_model_len=200)

    ok, lines = check(Short(), WithEnd(), Characters())
    assert not ok and "other token ids: 'a'" in lines and "worst cosine 1.0000000" in lines
    # What both sides cut off at the model's limit is not compared.
    assert 'other token ids: "Sentence 0' not in lines and "other token ids: 'Sentence 0" not in lines


def test_there_is_a_threshold_for_every_dtype() -> None:
    assert set(THRESHOLDS) == {"float32", "bfloat16", "float16"}
    engine: Engine = RightEngine()  # type: ignore[assignment]
    assert engine.info.dtype in THRESHOLDS
