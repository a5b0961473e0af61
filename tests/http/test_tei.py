"""TEI's routes: bare lists, flat errors, and tokens there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.options import GatewayOptions
from gateway.tokenization.base import TextTokens
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from tests.http.served import BOS, EOS, Reply, Served, expected, serving, text_ids

EMBED_PATHS = ("/embed", "/")


def tei_error(reply: Reply, status: int = 422, error_type: str = "Validation") -> str:
    """The message, after a look at the shape."""
    assert reply.status == status, reply.body
    assert set(reply.value) == {"error", "error_type"}
    assert reply.value["error_type"] == error_type
    return str(reply.value["error"])


@pytest.mark.parametrize("path", EMBED_PATHS)
@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ("hello", [text_ids("hello")]),
        (["a", "b"], [text_ids("a"), text_ids("b")]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_embed_gives_a_list_of_vectors(
    server: Served, path: str, inputs: Any, rows: list[list[int]]
) -> None:
    reply = await server.embed({"inputs": inputs}, path=path)
    assert reply.status == 200
    np.testing.assert_allclose(reply.value, [expected(row) for row in rows], rtol=1e-6)
    assert reply.headers["x-compute-tokens"] == str(sum(map(len, rows)))


async def test_embed_normalises_unless_told_not_to(server: Served) -> None:
    reply = await server.embed({"inputs": [5], "normalize": False, "dimensions": 3}, path="/embed")
    np.testing.assert_allclose(reply.value, [expected([5], 3, normalize=False)], rtol=1e-6)


async def test_embed_in_msgpack_is_one_block(server: Served) -> None:
    headers = {"Content-Type": "application/msgpack"}
    data = msgspec.msgpack.encode({"inputs": ["a", "b"]})
    reply = await server.send("POST", "/embed", data=data, headers=headers)
    vectors = np.frombuffer(reply.value["embeddings"], "<f4").reshape(reply.value["shape"])
    np.testing.assert_allclose(vectors, [expected(text_ids(text)) for text in "ab"], rtol=1e-6)


@pytest.mark.parametrize(
    ("direction", "kept"),
    [(None, "a" * 510), ("right", "a" * 510), ("Right", "a" * 510), ("left", "a" * 420 + "b" * 90)],
)
async def test_what_is_too_long_is_cut_on_the_side_that_was_named(
    server: Served, direction: str | None, kept: str
) -> None:
    body = {"inputs": "a" * 600 + "b" * 90, "truncate": True, "truncation_direction": direction}
    reply = await server.embed(body, path="/embed")
    np.testing.assert_allclose(reply.value, [expected(text_ids(kept))], rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/embed", {}, "inputs is missing"),
        ("/embed", {"inputs": None}, "inputs is missing"),
        ("/embed", {"inputs": ""}, "inputs is an empty string"),
        ("/embed", {"inputs": []}, "inputs is an empty list"),
        ("/embed", {"inputs": [[]]}, "inputs[0] is empty"),
        ("/embed", {"inputs": ["a", ""]}, "inputs[1] is empty"),
        ("/embed", {"inputs": "a" * 600}, "inputs[0] has 602 tokens; this model takes at most 512"),
        ("/embed", {"inputs": [30_000]}, "inputs[0] is token id 30000"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction is 'up'"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "prompt_name is 'query'; this model has none"),
        ("/embed", {"inputs": "a", "dimensions": 9}, "dimensions is 9"),
        ("/embed", ["a"], "Expected `object`"),
        ("/similarity", {"inputs": "a"}, "$.inputs"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "sentences is an empty list"),
        ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, "source_sentence is"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b", ""]}},
            "sentences[1] is empty",
        ),
        ("/tokenize", {}, "inputs is missing"),
        ("/tokenize", {"inputs": []}, "inputs is an empty list"),
        ("/decode", {}, "ids is missing"),
        ("/decode", {"ids": [1, 99_999]}, "ids[1] is token id 99999"),
        ("/decode", {"ids": ["a"]}, "ids are texts"),
        ("/embed_all", {}, "inputs is missing"),
    ],
)
async def test_bad_requests_are_422_and_flat(server: Served, path: str, body: Any, words: str) -> None:
    assert words in tei_error(await server.embed(body, path=path))
    assert not server.engine.batches


@pytest.mark.parametrize("path", ["/embed_all", "/embed_sparse", "/predict"])
async def test_what_no_head_gives_is_named(server: Served, path: str) -> None:
    message = tei_error(await server.embed({"inputs": "a"}, path=path), error_type="Backend")
    assert message.startswith("model 'fake' does not give ")
    assert "/embed gives" in message


async def test_similarity_is_the_cosine_in_the_request_s_order(server: Served) -> None:
    sentences = ["hello", "other", "Hello"]
    body = {"inputs": {"source_sentence": "hello", "sentences": sentences}}
    for path in ("/similarity", "/"):
        reply = await server.embed(body, path=path)
        source = expected(text_ids("hello")).astype(float)
        np.testing.assert_allclose(
            reply.value, [source @ expected(text_ids(text)) for text in sentences], atol=1e-6
        )
        assert abs(reply.value[0] - 1) < 1e-6


@pytest.mark.parametrize(("direction", "kept"), [(None, "a" * 510), ("Left", "a" * 420 + "b" * 90)])
async def test_similarity_cuts_when_asked_to(server: Served, direction: str | None, kept: str) -> None:
    inputs = {"source_sentence": "a" * 600 + "b" * 90, "sentences": [kept, "c"]}
    parameters = {"truncate": True, "truncation_direction": direction}
    reply = await server.embed({"inputs": inputs, "parameters": parameters}, path="/similarity")
    source, other = (expected(text_ids(text)).astype(float) for text in (kept, "c"))
    np.testing.assert_allclose(reply.value, [1.0, source @ other], atol=1e-6)


async def test_the_root_takes_msgpack_too(server: Served) -> None:
    headers = {"Content-Type": "application/msgpack"}
    body = {"inputs": {"source_sentence": "a", "sentences": ["a"]}}
    reply = await server.send("POST", "/", data=msgspec.msgpack.encode(body), headers=headers)
    np.testing.assert_allclose(reply.value, [1.0], atol=1e-6)


async def test_tokens_there_and_back(server: Served) -> None:
    text = "hi, wörld"
    [tokens] = (await server.embed({"inputs": text}, path="/tokenize")).value
    assert [token["id"] for token in tokens] == text_ids(text)
    assert tokens[0] == {"id": BOS, "text": "<s>", "special": True, "start": None, "stop": None}
    assert tokens[1] == {"id": text_ids("h")[1], "text": "h", "special": False, "start": 0, "stop": 1}
    ids = [token["id"] for token in tokens]
    assert (await server.embed({"ids": ids}, path="/decode")).value == [text]
    body = {"ids": [ids, [BOS, EOS]], "skip_special_tokens": False}
    assert (await server.embed(body, path="/decode")).value == [f"<s>{text}</s>", "<s></s>"]


async def test_tokens_without_the_template(server: Served) -> None:
    rows = (await server.embed({"inputs": ["ab", "c"], "add_special_tokens": False}, path="/tokenize")).value
    assert [[token["text"] for token in row] for row in rows] == [["a", "b"], ["c"]]


async def test_without_a_tokenizer_texts_are_told_so() -> None:
    async with serving() as server:
        for path, body in (
            ("/embed", {"inputs": "a"}),
            ("/tokenize", {"inputs": "a"}),
            ("/decode", {"ids": [1]}),
        ):
            assert "no tokenizer" in tei_error(await server.embed(body, path=path), error_type="Tokenizer")


async def test_more_tokens_than_a_request_may_have(tokenizer: HuggingFaceTokenizer) -> None:
    async with serving(GatewayOptions(max_request_tokens=100), tokenizer=tokenizer) as server:
        for path, body in (
            ("/embed", {"inputs": ["a" * 60] * 2}),
            ("/tokenize", {"inputs": "a" * 99}),
            ("/decode", {"ids": [[1] * 60] * 2}),
        ):
            assert "at most 100" in tei_error(await server.embed(body, path=path))


async def test_too_many_tokens_are_refused_before_they_are_made(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = tokenizer.tokens

    def tokens(texts: Sequence[str], *, special_tokens: bool) -> Iterator[TextTokens]:
        made.append(len(texts))
        return make(texts, special_tokens=special_tokens)

    monkeypatch.setattr(tokenizer, "tokens", tokens)
    async with serving(GatewayOptions(max_request_tokens=100), tokenizer=tokenizer) as server:
        for length, special_tokens, fits in ((98, True, True), (99, True, False), (100, False, True)):
            body = {"inputs": "a" * length, "add_special_tokens": special_tokens}
            reply = await server.embed(body, path="/tokenize")
            assert (reply.status == 200) is fits
        reply = await server.embed(
            {"inputs": ["a" * 60, "a" * 41], "add_special_tokens": False}, path="/tokenize"
        )
        assert "101 tokens in all; this server takes at most 100" in tei_error(reply)
    assert made == [1, 1]


async def test_info_has_tei_s_fields(server: Served) -> None:
    info = (await server.send("GET", "/info")).value
    assert info["model_id"] == "fake"
    assert info["model_dtype"] == "float32"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 512
    assert info["max_batch_tokens"] == 4096
    assert info["max_client_batch_size"] == 2048
    assert info["max_concurrent_requests"] == GatewayOptions().max_outstanding_requests
    assert info["auto_truncate"] is False
