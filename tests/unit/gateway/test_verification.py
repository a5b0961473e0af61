"""The verdict on a model: a different token, a wrong vector or a NaN in any one text must turn it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.tokenization.base import PairTokens, SpecialTokens
from gateway.verification import verify
from gateway.verification_findings import (
    COSINES,
    DIFFERENCES,
    TOKEN_COSINES,
    Criterion,
    criteria,
    describe,
    passed,
)
from gateway.verification_texts import TEXTS
from rose.batch import BatchResult, EngineInfo, Float32, Int8, Int32, RaggedBatch, TokenOutput
from tests.fakes import fake_info

DIMENSIONS = 8
COSINE, DIFFERENCE = {"vector": Criterion("cosine", 0.99999)}, {"logits": Criterion("difference", 0.001)}
TOKEN_WIDTHS: dict[TokenOutput, int] = {"lexical": 1, "multi_vector": 12, "hidden": 12}


def vector_of(ids: Int32, types: Int32 | None = None) -> Float32:
    """Depends on every id, its type and its place."""
    typed = ids + 1.0 if types is None else ids + 1.0 + 0.5 * types
    angles = np.outer(typed, np.arange(1, DIMENSIONS + 1)) * np.arange(1, len(ids) + 1)[:, None]
    vector: Float32 = np.cos(angles).sum(0).astype(np.float32)
    return vector


def quantised(vectors: Float32) -> Int8:
    return np.rint(np.tanh(vectors) * 127).astype(np.int8)


def tokens_of(ids: Int32, kind: TokenOutput) -> Float32:
    """f32[n, W] that depends on the ids."""
    angles = np.outer(ids + 1.0, np.arange(1, TOKEN_WIDTHS[kind] + 1)) + len(kind)
    values: Float32 = np.cos(angles).astype(np.float32)
    return np.maximum(values, 0) if kind == "lexical" else values


class Done:
    """A LazyTensor that is done."""

    def __init__(self, result: BatchResult) -> None:
        self.done = True
        self._result = result

    def result(self) -> BatchResult:
        return self._result


class RightEngine:
    """Gives vector_of each sequence; keeps the batches it got."""

    def __init__(self, **changes: object) -> None:
        info = fake_info(dimensions=DIMENSIONS, max_batch_seqs=4, max_batch_tokens=700)
        self.info: EngineInfo = replace(info, **changes)  # type: ignore[arg-type]
        self.batches: list[RaggedBatch] = []

    def step(self, batch: RaggedBatch) -> Done:
        self.batches.append(batch)
        rows = np.split(batch.input_ids, batch.cu_seqlens[1:-1])
        types = [None] * len(rows)
        if batch.token_type_ids is not None:
            types = np.split(batch.token_type_ids, batch.cu_seqlens[1:-1])
        vectors = np.stack([vector_of(*row) for row in zip(rows, types, strict=True)])
        int8 = quantised(vectors) if self.info.has_int8 else None
        tokens = {kind: tokens_of(batch.input_ids, kind) for kind in batch.token_outputs}
        return Done(BatchResult(vectors, int8, tokens=tokens))


class Characters:
    """A tokenizer of code points between 1 and 2, with 2 and 3 between those of a pair."""

    speedup = 1

    special_tokens = SpecialTokens(np.array([1], np.int32), np.array([2], np.int32))
    pair_tokens = PairTokens(*(np.array(ids, np.int32) for ids in ([1], [2, 3], [2])), (0, 0, 0, 1, 1))

    def literal(self) -> Characters:
        return self

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        return [np.array([1, *(ord(character) % 500 for character in text), 2], np.int32) for text in texts]


class RightOracle:
    """Joins by hand what Characters' templates say."""

    def tokens(self, texts: Sequence[str], max_tokens: int) -> tuple[Int32, Int32 | None]:
        own = [[ord(character) % 500 for character in text] for text in texts]
        if len(own) == 1:
            return np.array([1, *own[0][: max_tokens - 2], 2], np.int32), None
        first, second = own
        while len(first) + len(second) > max_tokens - 4:  # one by one off the longer, as in transformers
            (first if len(first) > len(second) else second).pop()
        types = [0] * (len(first) + 3) + [1] * (len(second) + 1)
        return np.array([1, *first, 2, 3, *second, 2], np.int32), np.array(types, np.int32)

    def output(self, input_ids: Int32, token_type_ids: Int32 | None) -> Float32:
        return vector_of(input_ids, token_type_ids)

    def token_output(self, input_ids: Int32, kind: TokenOutput) -> Float32:
        return tokens_of(input_ids, kind)

    def result(self, input_ids: Int32, token_type_ids: Int32 | None) -> BatchResult:
        tokens = {kind: self.token_output(input_ids, kind) for kind in TOKEN_WIDTHS}
        return BatchResult(self.output(input_ids, token_type_ids)[None], tokens=tokens)

    def quantised(self, vectors: Float32) -> Int8:
        return quantised(vectors)


def check(
    engine: object, oracle: object, tokenizer: object | None = None, wanted: Mapping[str, Criterion] = COSINE
) -> tuple[bool, str]:
    findings = verify(TEXTS, tokenizer, engine, oracle, wanted)  # type: ignore[arg-type]
    return passed(findings, wanted), "\n".join(describe(findings, wanted))


def test_the_same_model_passes_in_ragged_batches_within_the_limits() -> None:
    engine = RightEngine()
    ok, lines = check(engine, RightOracle(), Characters())
    assert ok and lines.endswith("the same") and "worst cosine 1.0000000" in lines
    assert sum(batch.num_seqs for batch in engine.batches) == len(TEXTS) < 4 * len(engine.batches)
    assert max(batch.num_seqs for batch in engine.batches) == 4
    assert max(batch.num_tokens for batch in engine.batches) <= 700


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

        def output(self, input_ids: Int32, token_type_ids: Int32 | None) -> Float32:
            vector = super().output(input_ids, token_type_ids)
            if self.calls == number:
                vector[2] += wrong
            self.calls += 1
            return vector

    ok, lines = check(RightEngine(), WrongOracle(), Characters())
    assert not ok and lines.endswith("NOT the same")
    assert repr(TEXTS[number][:40])[1:-1] in lines
    assert lines.count("cosine") == 2 and repr(TEXTS[number][:40])[1:-1] in lines.splitlines()[-1]


def test_other_token_ids_fail_even_if_the_vectors_agree() -> None:
    class WithEnd(RightOracle):
        def tokens(self, texts: Sequence[str], max_tokens: int) -> tuple[Int32, Int32 | None]:
            ids, types = super().tokens(texts, max_tokens)
            return (ids if len(ids) == max_tokens else np.append(ids, 7)), types

    ok, lines = check(RightEngine(max_model_len=200), WithEnd(), Characters())
    assert not ok and "other tokens: 'a'" in lines and "worst cosine 1.0000000" in lines
    # What both sides cut to the model's limit is the same.
    assert "other tokens: 'Sentence 0" not in lines


SCORER = {"task": "score", "labels": ("score",), "type_vocab_size": 2, "max_model_len": 200}


def test_a_scorer_reads_texts_and_pairs_with_their_types() -> None:
    engine = RightEngine(**SCORER)
    ok, lines = check(engine, RightOracle(), Characters(), DIFFERENCE)
    assert ok and lines.startswith(f"{2 * len(TEXTS)} texts, worst difference 0.0000000")
    assert sum(batch.token_type_ids is not None for batch in engine.batches) >= len(TEXTS) // 4
    assert check(RightEngine(**SCORER), RightOracle(), None, DIFFERENCE)[0]


def test_other_types_fail_only_where_the_model_tells_them_apart() -> None:
    class NoTypes(RightOracle):
        def tokens(self, texts: Sequence[str], max_tokens: int) -> tuple[Int32, Int32 | None]:
            return super().tokens(texts, max_tokens)[0], None

    ok, lines = check(RightEngine(**SCORER), NoTypes(), Characters(), DIFFERENCE)
    assert not ok and lines.count("other tokens") == len(TEXTS)
    assert check(RightEngine(**SCORER | {"type_vocab_size": 1}), NoTypes(), Characters(), DIFFERENCE)[0]


@pytest.mark.parametrize("wrong", [0.002, -0.002, np.nan, np.inf])
def test_a_score_that_is_off_is_found_though_the_cosine_is_not(wrong: float) -> None:
    class WrongOracle(RightOracle):
        def output(self, input_ids: Int32, token_type_ids: Int32 | None) -> Float32:
            vector = super().output(input_ids, token_type_ids)
            vector[1] += wrong if len(input_ids) == len(TEXTS[1]) + 2 else 0.0
            return vector

    ok, lines = check(RightEngine(**SCORER), WrongOracle(), Characters(), DIFFERENCE)
    assert not ok and lines.count("difference") == 2 and lines.count("Hello, world!'") == 2
    assert lines.endswith("(at most 0.001 wanted): NOT the same")


def test_a_reranker_that_chats_reads_pairs_alone() -> None:
    class Chat(RightOracle):
        def tokens(self, texts: Sequence[str], max_tokens: int) -> None:
            assert len(texts) == 2

    engine = RightEngine(**SCORER | {"score_template": "qwen3", "max_model_len": 700})
    ok, lines = check(engine, Chat(), Characters(), DIFFERENCE)
    assert ok and lines.startswith(f"{len(TEXTS)} texts")
    assert min(np.diff(batch.cu_seqlens).min() for batch in engine.batches) > 300


MANY = {"has_int8": True, "token_outputs": TOKEN_WIDTHS, "max_token_bytes": 4 * 25 * 500}
OF_MANY = criteria(RightEngine(**MANY).info, Namespace(threshold=None, tolerance=None))


def test_int8_and_what_tokens_give_are_compared_too() -> None:
    engine = RightEngine(**MANY)
    ok, lines = check(engine, RightOracle(), Characters(), OF_MANY)
    assert ok
    names = [line.split(", ", 1)[1].split()[0] for line in lines.splitlines()]
    assert names == ["lexical:", "multi_vector:", "hidden:", "int8:", "worst"]
    of_tokens = [batch for batch in engine.batches if batch.token_outputs]
    assert sum(batch.num_seqs for batch in of_tokens) == len(TEXTS)
    assert all(batch.num_tokens <= 500 for batch in of_tokens if batch.num_seqs > 1)


@pytest.mark.parametrize("kind", TOKEN_WIDTHS)
def test_one_wrong_token_is_found(kind: TokenOutput) -> None:
    class WrongOracle(RightOracle):
        def token_output(self, input_ids: Int32, kind_asked: TokenOutput) -> Float32:
            values = super().token_output(input_ids, kind_asked)
            if kind_asked == kind and len(input_ids) == len(TEXTS[2]) + 2:
                values[5, 0] += 0.4
            return values

    ok, lines = check(RightEngine(**MANY), WrongOracle(), Characters(), OF_MANY)
    assert not ok and lines.endswith("NOT the same")
    assert lines.startswith(f"{kind}: ") and lines.count(repr(TEXTS[2])) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: np.rint(np.tanh(x) * 128).clip(-128, 127),
        lambda x: np.floor(np.tanh(x) * 127),
        lambda x: np.rint(np.clip(x, -1, 1) * 127),
        lambda x: np.rint(np.tanh(x) * 127) + 2 * (np.arange(x.size) == 3),
    ],
    ids=["128", "floor", "no tanh", "one value"],
)
def test_another_quantiser_is_found(wrong: Callable[[Float32], Float32]) -> None:
    class WrongOracle(RightOracle):
        def quantised(self, vectors: Float32) -> Int8:
            return wrong(vectors / 40).astype(np.int8)

    class SmallEngine(RightEngine):
        """Of vectors that the quantiser does not squash to its ends."""

        def step(self, batch: RaggedBatch) -> Done:
            result = super().step(batch).result()
            return Done(replace(result, int8=quantised(result.vectors / 40)))

    ok, lines = check(SmallEngine(**MANY), WrongOracle(), Characters(), OF_MANY)
    assert not ok and lines.startswith("int8: share ") and lines.endswith("NOT the same")


def test_flags_hold_for_what_they_name() -> None:
    flags = Namespace(threshold=0.5, tolerance=0.25)
    limits = {name: criterion.limit for name, criterion in criteria(RightEngine(**MANY).info, flags).items()}
    assert limits == {"lexical": 0.25, "multi_vector": 0.5, "hidden": 0.5, "int8": 0.01, "vector": 0.5}


def test_there_is_a_limit_for_every_dtype() -> None:
    dtypes = {"float32", "bfloat16", "float16", "fp8"}
    assert set(COSINES) == set(TOKEN_COSINES) == set(DIFFERENCES) == dtypes
