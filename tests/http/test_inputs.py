"""What the embeddings route takes as input, and how it refuses the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.options import GatewayOptions
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from tests.fakes import FakeEngine, fake_info
from tests.http.served import PATHS, Served, expected, serving, text_ids

GOOD = [
    ("a string", "hello", [text_ids("hello")]),
    ("strings", ["hello", "wörld", "hello"], [text_ids("hello"), text_ids("wörld"), text_ids("hello")]),
    ("token ids", [1, 2, 29_999], [[1, 2, 29_999]]),
    ("lists of token ids", [[7], [0, 0], [29_999]], [[7], [0, 0], [29_999]]),
    ("only blanks", "   ", [text_ids("   ")]),
    ("only newlines", ["\n\n\n"], [text_ids("\n\n\n")]),
    ("a control character", "\u0000", [text_ids("\u0000")]),
    ("a pair of surrogates", "\U0001f600", [text_ids("\U0001f600")]),
    ("exactly the longest", [3] * 512, [[3] * 512]),
    ("one below the longest", [3] * 511, [[3] * 511]),
    ("the longest text", "x" * 510, [text_ids("x" * 510)]),
    ("a special token's text", "a</s>b", [[256, *text_ids("a")[1:-1], 257, *text_ids("b")[1:-1], 257]]),
]


@pytest.mark.parametrize(("value", "ids"), [case[1:] for case in GOOD], ids=[case[0] for case in GOOD])
@pytest.mark.parametrize("path", PATHS)
async def test_every_kind_of_input_is_embedded_in_order(
    server: Served, path: str, value: Any, ids: list[list[int]]
) -> None:
    reply = await server.embed({"input": value}, path)
    assert reply.status == 200, reply.body
    np.testing.assert_allclose(reply.vectors, [expected(row) for row in ids], rtol=1e-6)
    assert [item["index"] for item in reply.value["data"]] == list(range(len(ids)))
    tokens = sum(map(len, ids))
    assert reply.value["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert reply.value["object"] == "list"
    assert reply.value["model"] == "fake"


BAD = [
    ("missing", {}, "input is missing"),
    ("null", {"input": None}, "input is missing"),
    ("empty string", {"input": ""}, "input is an empty string"),
    ("empty list", {"input": []}, "input is an empty list"),
    ("an empty string in a list", {"input": ["a", ""]}, "input[1] is empty"),
    ("an empty list of ids", {"input": [[]]}, "input[0] is empty"),
    ("a later empty list of ids", {"input": [[1], [2], []]}, "input[2] is empty"),
    ("null in a list", {"input": ["a", None]}, "$.input[1]"),
    ("an object", {"input": {"text": "a"}}, "$.input"),
    ("a number", {"input": 5}, "$.input"),
    ("a fraction", {"input": [1.5]}, "$.input[0]"),
    ("a boolean", {"input": [True]}, "$.input[0]"),
    ("lists too deep", {"input": [[[1]]]}, "$.input[0][0]"),
    ("mixed kinds", {"input": ["a", 5]}, "input[1] is a token id, but input[0] is a string"),
    ("mixed kinds of lists", {"input": [[1], "a"]}, "input[1] is a string, but input[0] is a list"),
    ("an id too high", {"input": [0, 30_000]}, "input[1] is token id 30000; this model takes 0 to 29999"),
    ("an id far too high", {"input": [[1], [99_999_999]]}, "input[1][0] is token id 99999999"),
    ("a negative id", {"input": [-1]}, "input[0] is token id -1"),
    ("an id beyond int32", {"input": [[5, 2**31]]}, f"input[0][1] is token id {2**31}"),
    ("an id beyond int64", {"input": [-(10**30)]}, "Expected `int` >= -9223372036854775808"),
    ("too many items", {"input": ["a"] * 2049}, "input has 2049 items; this server takes at most 2048"),
    ("too many tokens", {"input": [3] * 513}, "input[0] has 513 tokens; this model takes at most 512"),
    ("too long a text", {"input": ["a", "b" * 511]}, "input[1] has 513 tokens; this model takes at most 512"),
    ("far too long a text", {"input": "b" * 67_337}, "input[0] has 67339 tokens"),
    ("no dimensions", {"input": "a", "dimensions": 0}, "dimensions is 0; this model takes 1 to 8"),
    ("negative dimensions", {"input": "a", "dimensions": -1}, "dimensions is -1"),
    ("no output dimension", {"input": "a", "output_dimension": 0}, "output_dimension is 0; this model takes"),
    ("too many dimensions", {"input": "a", "dimensions": 9}, "dimensions is 9"),
    ("huge dimensions", {"input": "a", "dimensions": 10**40}, f"dimensions is {10**40}"),
    ("dimensions in words", {"input": "a", "dimensions": "4"}, "$.dimensions"),
    ("an unknown encoding", {"input": "a", "encoding_format": "xml"}, "encoding_format is 'xml'"),
    ("an encoding of a megabyte", {"input": "a", "encoding_format": "x" * 2**20}, "x" * 100 + "'...;"),
    ("an encoding that is no word", {"input": "a", "encoding_format": 1}, "$.encoding_format"),
    ("normalize in words", {"input": "a", "normalize": "yes"}, "$.normalize"),
    ("input twice", {"input": "a", "input_ids": "AAAAAA=="}, "input and input_ids are both given"),
    ("ids that are no base64", {"input_ids": "%"}, "$.input_ids"),
    ("ids of five bytes", {"input_ids": "AAAAAAA="}, "input_ids has 5 bytes"),
]


@pytest.mark.parametrize(("body", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
async def test_a_bad_value_is_refused_by_name(server: Served, body: Any, words: str) -> None:
    reply = await server.embed(body)
    assert reply.status == 400
    assert words in reply.error["message"]
    assert len(reply.body) < 2000
    assert reply.error["type"] == "invalid_request_error"
    assert not server.engine.batches
    await server.assert_works()


async def test_bad_requests_name_the_field(server: Served) -> None:
    for body, param in (
        ({}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "output_dimension": 0}, "output_dimension"),
        ({"input": [1.5]}, "input"),
    ):
        assert (await server.embed(body)).error["param"] == param


TRUNCATED = [
    ("a text", "b" * 600, [256, *text_ids("b" * 510)[1:-1], 257]),
    ("ids", list(range(600)), list(range(512))),
    ("a text that fits", "b" * 510, text_ids("b" * 510)),
]


@pytest.mark.parametrize(
    ("value", "ids"), [case[1:] for case in TRUNCATED], ids=[case[0] for case in TRUNCATED]
)
async def test_truncate_keeps_the_start_and_the_template(server: Served, value: Any, ids: list[int]) -> None:
    reply = await server.embed({"input": value, "truncate": True})
    np.testing.assert_allclose(reply.vectors, [expected(ids)], rtol=1e-6)
    assert reply.value["usage"]["prompt_tokens"] == len(ids)


async def test_truncate_off_is_the_same_as_not_given(server: Served) -> None:
    for truncate in (False, None):
        reply = await server.embed({"input": "b" * 600, "truncate": truncate})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


async def test_unknown_fields_and_nulls_are_passed_over(server: Served) -> None:
    extras = {"user": {"any": ["thing"]}, "input_type": None, "truncate_prompt_tokens": -1, "": [None, 1e300]}
    nulls = dict.fromkeys(("model", "dimensions", "encoding_format", "normalize", "truncate"))
    reply = await server.embed({"input": "a", **extras, **nulls})
    np.testing.assert_allclose(reply.vectors, [expected(text_ids("a"))], rtol=1e-6)


async def test_text_without_a_tokenizer_says_what_to_send_instead() -> None:
    async with serving() as server:
        reply = await server.embed({"input": "text"})
        assert (reply.status, reply.error["code"]) == (400, "text_not_supported")
        assert "token ids" in reply.error["message"]
        await server.assert_works()


async def test_a_tokenizer_that_knows_more_ids_than_the_model_cannot_reach_it(
    tokenizer: HuggingFaceTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    info = fake_info()
    small = FakeEngine(info=replace(info, vocab_size=257))
    async with serving(engine=small, tokenizer=tokenizer) as server:
        reply = await server.embed({"input": "a"})
        assert reply.status == 400
        assert "tokens of input[0][2] is token id 257" in reply.error["message"]
        assert not small.batches
    assert "the tokenizer gives ids up to 257, the model takes up to 256" in caplog.text


async def test_limits_follow_the_options(tokenizer: HuggingFaceTokenizer) -> None:
    options = GatewayOptions(max_items=2, max_request_tokens=10)
    async with serving(options, tokenizer=tokenizer) as server:
        assert (await server.embed({"input": ["a", "b"]})).status == 200
        reply = await server.embed({"input": ["a", "b", "c"]})
        assert "3 items; this server takes at most 2" in reply.error["message"]
        reply = await server.embed({"input": [[1] * 6, [2] * 5]})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "11 tokens in all; this server takes at most 10" in reply.error["message"]


async def test_a_hundred_inputs_of_4096_tokens_are_one_request() -> None:
    engine = FakeEngine(info=replace(fake_info(), max_model_len=4096))
    async with serving(engine=engine) as server:
        reply = await server.embed({"input": [[7] * 4096] * 100, "encoding_format": "base64"})
        assert reply.status == 200, reply.body
        assert reply.value["usage"]["prompt_tokens"] == 100 * 4096


async def test_a_step_smaller_than_the_model_sets_the_limit() -> None:
    info = fake_info()
    engine = FakeEngine(info=replace(info, max_batch_tokens=100))
    async with serving(engine=engine) as server:
        assert (await server.embed({"input": [1] * 100})).status == 200
        assert "at most 100" in (await server.embed({"input": [1] * 101})).error["message"]
