"""Reranking by what two texts' tokens give: late interaction, and the words that both have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gateway.late_interaction import late_interaction, shared_words
from gateway.token_outputs import heaviest
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from tests.fakes import FakeEngine
from tests.http.served import Served, serving
from tests.http.test_sparse import engine_of, save
from tests.http.test_token_outputs import INFO, tokens_of, words_of

QUERY, TEXTS = "a rose", ["a rose is a rose", "steel", "arose", "A"]


def by_tokens(text: str) -> float:
    """The definition, row by row."""
    query, document = (tokens_of(part, "multi_vector", 4)[1:] for part in (QUERY, text))
    return float(np.mean([max(float(row @ other) for other in document) for row in query]))


def by_words(text: str) -> float:
    query, document = words_of(QUERY), words_of(text)
    return sum(weight * document.get(index, 0.0) for index, weight in query.items())


@pytest.mark.parametrize(("score_by", "score"), [("multi_vector", by_tokens), ("sparse", by_words)])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_by_what_is_asked_for(
    tokenizer: HuggingFaceTokenizer, path: str, score_by: str, score: Any
) -> None:
    async with serving(engine=FakeEngine(info=INFO), tokenizer=tokenizer) as server:
        body = {"query": QUERY, "documents": TEXTS, "score_by": score_by}
        results = (await server.embed(body, path=path)).value["results"]
    scores = [score(text) for text in TEXTS]
    assert len({round(value, 6) for value in scores}) > 2
    assert [result["index"] for result in results] == sorted(range(4), key=lambda index: -scores[index])
    expected = [scores[result["index"]] for result in results]
    np.testing.assert_allclose([r["relevance_score"] for r in results], expected, atol=1e-6)


@pytest.mark.parametrize(("score_by", "score"), [("multi_vector", by_tokens), ("sparse", by_words)])
async def test_pairs_are_scored_by_what_is_asked_for(
    tokenizer: HuggingFaceTokenizer, score_by: str, score: Any
) -> None:
    async with serving(engine=FakeEngine(info=INFO), tokenizer=tokenizer) as server:
        body = {"text_1": QUERY, "text_2": TEXTS, "score_by": score_by}
        pairs = (await server.embed(body, path="/score")).value["data"]
        refused = await server.embed(body | {"score_by": "colbert"}, path="/score")
    np.testing.assert_allclose([pair["score"] for pair in pairs], [score(text) for text in TEXTS], atol=1e-6)
    assert (refused.status, refused.value["error"]["param"]) == (400, "score_by")


async def test_splade_models_rank_by_their_words(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    save(tmp_path)
    engine = engine_of(tmp_path)
    async with serving(engine=engine, tokenizer=tokenizer) as server:
        ranks = (await server.embed({"query": QUERY, "texts": TEXTS}, path="/rerank")).value
        words = (await server.embed({"inputs": [QUERY, *TEXTS]}, path="/embed_sparse")).value
    engine.close()
    rows = np.zeros((5, engine.info.dimensions))
    for row, items in zip(rows, words, strict=True):
        row[[item["index"] for item in items]] = [item["value"] for item in items]
    for rank in ranks:
        assert rank["score"] == pytest.approx(float(rows[0] @ rows[1 + rank["index"]]), rel=1e-5)


async def test_what_a_model_does_not_give_is_refused(server: Served) -> None:
    for score_by, words in (("multi_vector", "gives no multi-vectors"), ("colbert", "score_by is 'colbert'")):
        body = {"query": QUERY, "documents": TEXTS, "score_by": score_by}
        reply = await server.embed(body, path="/v2/rerank")
        assert (reply.status, words in reply.value["message"]) == (400, True)
    assert not server.engine.batches


@given(st.data())
def test_the_heaviest_of_each_id_stays(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 30))
    ids = data.draw(arrays(np.int32, count, elements=st.integers(0, 9)))
    weights = data.draw(arrays(np.float32, count, elements=st.floats(0, 4, width=32)))
    words = heaviest(ids, weights, (0, 3))
    expected: dict[int, float] = {}
    for index, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if index not in (0, 3) and weight > 0:
            expected[index] = max(weight, expected.get(index, 0.0))
    assert dict(zip(words.indices.tolist(), words.values.tolist(), strict=True)) == expected
    assert words.indices.tolist() == sorted(expected)
    assert shared_words(words, words) == pytest.approx(sum(weight**2 for weight in expected.values()))


def test_long_queries_are_taken_in_parts() -> None:
    rng = np.random.default_rng(0)
    query, document = (rng.standard_normal((count, 8), dtype=np.float32) for count in (2500, 7))
    expected = (query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).mean()
    assert late_interaction(query, document) == pytest.approx(expected, rel=1e-5)
    assert late_interaction(query[:0], document) == late_interaction(query, document[:0]) == 0.0
