"""Reranking and scores in every dialect: the same numbers, each in its own shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.http.served import Served, expected, text_ids

QUERY, TEXTS = "what is a rose", ["a flower", "what is a rose", "steel", "a Flower"]


def cosine(one: str, other: str) -> float:
    return float(expected(text_ids(one)).astype(float) @ expected(text_ids(other)).astype(float))


SCORES = [cosine(QUERY, text) for text in TEXTS]
ORDER = sorted(range(len(TEXTS)), key=lambda index: -SCORES[index])


async def test_tei(server: Served) -> None:
    body = {"query": QUERY, "texts": TEXTS, "return_text": True, "raw_scores": True}
    ranks = (await server.embed(body, path="/rerank")).value
    assert [rank["index"] for rank in ranks] == ORDER
    assert [rank["text"] for rank in ranks] == [TEXTS[index] for index in ORDER]
    np.testing.assert_allclose([rank["score"] for rank in ranks], [SCORES[i] for i in ORDER], atol=1e-6)
    bare = (await server.embed({"query": QUERY, "texts": TEXTS}, path="/rerank")).value
    assert set(bare[0]) == {"index", "score"}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_cohere_jina_infinity_and_vllm(server: Served, path: str) -> None:
    documents: list[Any] = [TEXTS[0], {"text": TEXTS[1], "title": "passed over"}, *TEXTS[2:]]
    body = {"query": QUERY, "documents": documents, "model": "fake", "top_n": 2, "unknown": [1]}
    reply = await server.embed({**body, "return_documents": True}, path=path)
    results = reply.value["results"]
    assert [result["index"] for result in results] == ORDER[:2]
    assert [result["document"] for result in results] == [{"text": TEXTS[index]} for index in ORDER[:2]]
    np.testing.assert_allclose(
        [r["relevance_score"] for r in results], [SCORES[i] for i in ORDER[:2]], atol=1e-6
    )
    tokens = sum(len(text_ids(text)) for text in [QUERY, *TEXTS])
    assert reply.value["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert reply.value["meta"]["billed_units"] == {"search_units": 1}
    assert reply.value["model"] == "fake"
    bare = await server.embed(body, path=path)
    assert set(bare.value["results"][0]) == {"index", "relevance_score"}
    assert bare.value["id"] != reply.value["id"]


async def test_voyage(server: Served) -> None:
    body = {"query": QUERY, "documents": TEXTS, "model": "fake", "top_k": 1, "truncation": True}
    reply = await server.embed({**body, "return_documents": None}, path="/v1/rerank")
    [result] = reply.value["data"]
    assert result["index"] == ORDER[0]
    assert "results" not in reply.value
    reply = await server.embed({**body, "return_documents": True}, path="/v1/rerank")
    assert reply.value["data"][0]["document"] == TEXTS[ORDER[0]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_vllm_scores(server: Served, path: str, names: tuple[str, str]) -> None:
    one, many = names
    reply = await server.embed({one: QUERY, many: TEXTS}, path=path)
    assert [item["index"] for item in reply.value["data"]] == [0, 1, 2, 3]
    np.testing.assert_allclose([item["score"] for item in reply.value["data"]], SCORES, atol=1e-6)
    pairs = await server.embed({one: TEXTS, many: list(reversed(TEXTS))}, path=path)
    wanted = [cosine(a, b) for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
    np.testing.assert_allclose([item["score"] for item in pairs.value["data"]], wanted, atol=1e-6)
    single = await server.embed({one: QUERY, many: TEXTS[0]}, path=path)
    np.testing.assert_allclose([item["score"] for item in single.value["data"]], SCORES[:1], atol=1e-6)


async def test_a_query_is_embedded_once(server: Served) -> None:
    await server.embed({"query": QUERY, "texts": TEXTS}, path="/rerank")
    assert sum(batch.num_seqs for batch in server.engine.batches) == 1 + len(TEXTS)


LONG = "a" * 600


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (
            "/rerank",
            {"query": "q", "texts": ["a", LONG]},
            422,
            "texts[1] has 602 tokens; this model takes at most 512",
        ),
        ("/rerank", {"query": LONG, "texts": ["a"]}, 422, "query has 602 tokens"),
        ("/rerank", {"query": "q", "texts": []}, 422, "texts is an empty list"),
        ("/rerank", {"query": "q", "texts": ["a", ""]}, 422, "texts[1] is empty"),
        ("/rerank", {"query": "", "texts": ["a"]}, 422, "query is an empty string"),
        ("/rerank", {"query": "q", "texts": [""]}, 422, "texts[0] is empty"),
        ("/rerank", {"query": "q"}, 422, "texts and documents are both missing"),
        ("/rerank", {"texts": ["a"]}, 422, "query"),
        ("/rerank", {"query": "q", "documents": ["a", ""]}, 400, "documents[1] is empty"),
        ("/rerank", {"query": "q", "documents": [""]}, 400, "documents[0] is empty"),
        ("/rerank", {"query": "q", "documents": ["a"], "texts": ["a"]}, 400, "both given"),
        ("/rerank", {"query": "q", "documents": ["a"], "model": "x"}, 404, "'x'"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, 400, "top_n is 0"),
        ("/v1/rerank", {"query": "q", "documents": [LONG], "truncation": False}, 400, "documents[0] has 602"),
        ("/v1/rerank", {"query": "q", "documents": [5]}, 400, "$.documents[0]"),
        ("/v2/rerank", {"query": "q", "documents": [LONG], "truncate": False}, 400, "documents[0] has 602"),
        (
            "/v2/rerank",
            {"query": "q", "documents": ["a"], "max_tokens_per_doc": 0},
            400,
            "max_tokens_per_doc",
        ),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, 400, "they make no pairs"),
        ("/score", {"text_1": "a"}, 400, "text_2 is missing"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, 400, "text_1 is given twice"),
        ("/score", {"text_1": ["a", ""], "text_2": ["b", "c"]}, 400, "text_1[1] is empty"),
        ("/score", {"text_1": [""], "text_2": "b"}, 400, "text_1[0] is empty"),
        ("/score", {"text_1": "a", "text_2": ""}, 400, "text_2 is an empty string"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "", "sentences": ["a"]}},
            422,
            "source_sentence is an",
        ),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": [""]}},
            422,
            "sentences[0] is empty",
        ),
        ("/score", {"queries": "a", "documents": [LONG]}, 400, "documents[0] has 602"),
        ("/score", {"queries": [LONG, "a"], "documents": ["a", "b"]}, 400, "queries[0] has 602"),
    ],
)
async def test_bad_requests_name_what_is_wrong(
    server: Served, path: str, body: Any, status: int, words: str
) -> None:
    reply = await server.embed(body, path=path)
    assert reply.status == status, reply.body
    assert words in reply.body.decode()
    assert not server.engine.batches


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": LONG, "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": LONG}, "text_2"),
        ({"queries": ["a", LONG], "documents": ["b", "c"]}, "queries"),
    ],
)
async def test_the_side_that_is_too_long_is_the_field_at_fault(server: Served, body: Any, param: str) -> None:
    error = (await server.embed(body, path="/score")).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/rerank", {"query": LONG, "documents": [LONG]}),
        ("/v2/rerank", {"query": LONG, "documents": [LONG]}),
        ("/v1/rerank", {"query": LONG, "documents": [LONG], "truncation": True}),
        ("/rerank", {"query": LONG, "texts": [LONG], "truncate": True}),
        ("/score", {"text_1": LONG, "text_2": LONG, "truncate_prompt_tokens": -1}),
    ],
)
async def test_what_is_too_long_is_cut_where_the_dialect_or_the_request_says_so(
    server: Served, path: str, fields: dict[str, Any]
) -> None:
    assert (await server.embed(fields, path=path)).status == 200
    assert [len(batch.input_ids) for batch in server.engine.batches] == [512, 512]


async def test_documents_can_be_cut_shorter(server: Served) -> None:
    body = {"query": "q", "documents": [LONG, "b"], "max_tokens_per_doc": 10}
    assert (await server.embed(body, path="/v2/rerank")).status == 200
    assert [len(batch.input_ids) for batch in server.engine.batches] == [3 + 10 + 3]


@pytest.mark.parametrize("text", ["a", "b", "ab", "abc", "abcd"])
async def test_no_cosine_is_beyond_one(server: Served, text: str) -> None:
    reply = await server.embed({"query": text, "texts": [text]}, path="/rerank")
    assert reply.value[0]["score"] <= 1.0
