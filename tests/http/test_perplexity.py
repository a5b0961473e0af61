"""Perplexity's dialect: int8 and bits, its limits, and errors as a list of what is wrong."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.options import GatewayOptions
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from tests.fakes import FakeEngine, fake_info, fake_vector
from tests.http.served import PATHS, Reply, Served, serving, text_ids

ROWS = [[1, 2, 3], [4], [5, 6]]
CONTEXT = "/v1/contextualizedembeddings"


@pytest.fixture
async def pplx(tokenizer: HuggingFaceTokenizer) -> AsyncIterator[Served]:
    """A model with its own int8, 16 values a vector."""
    info = fake_info(dimensions=16, has_int8=True)
    async with serving(engine=FakeEngine(info=info), tokenizer=tokenizer) as server:
        yield server


def detail(reply: Reply, status: int = 422) -> dict[str, Any]:
    """The one item of an error, after a look at the shape."""
    assert reply.status == status, reply.body
    [item] = reply.value["detail"]
    assert set(reply.value) == {"detail"}
    assert set(item) == {"loc", "msg", "type"}
    assert item["loc"][0] == "body"
    return dict(item)


def values(reply: Reply, dtype: str) -> Any:
    assert reply.status == 200, reply.body
    assert [item["index"] for item in reply.value["data"]] == list(range(len(reply.value["data"])))
    return np.array(
        [np.frombuffer(base64.b64decode(item["embedding"]), dtype) for item in reply.value["data"]]
    )


@pytest.mark.parametrize("path", PATHS)
async def test_int8_is_the_model_s_own(pplx: Served, path: str) -> None:
    reply = await pplx.embed({"input": ROWS, "encoding_format": "base64_int8", "dimensions": 8}, path=path)
    wanted = [np.rint(np.tanh(fake_vector(row, 16)) * 127)[:8] for row in ROWS]
    np.testing.assert_array_equal(values(reply, "<i1"), wanted)
    assert reply.value["object"] == "list"
    cost = {"input_cost": 0.0, "total_cost": 0.0, "currency": "USD"}
    assert reply.value["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "cost": cost}


async def test_bits_are_signs_and_the_first_is_the_lowest(pplx: Served) -> None:
    reply = await pplx.embed({"input": ROWS, "encoding_format": "base64_binary"})
    bits = np.unpackbits(values(reply, "u1"), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits, [fake_vector(row, 16) >= 0 for row in ROWS])


async def test_a_model_without_int8_is_scaled_by_vector(server: Served) -> None:
    got = values(await server.embed({"input": ROWS, "encoding_format": "base64_int8"}), "<i1")
    for row, vector in zip(ROWS, got, strict=True):
        real = fake_vector(row)
        np.testing.assert_array_equal(vector, np.rint(real / np.abs(real).max() * 127))


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"input": "b", "prompt": "a"}, {"input": "ab"}),
        ({"input": "b" * 600, "truncation": True}, {"input": "b" * 510}),
        ({"input": "abcd", "truncate_prompt_tokens": 4, "truncation_direction": "left"}, {"input": "cd"}),
        ({"input": "ab", "add_special_tokens": False}, {"input": text_ids("ab")[1:-1]}),
        ({"input": "ab", "output_dimension": 8}, {"input": "ab", "dimensions": 8}),
        ({"input": "ab", "normalize": True}, {"input": "ab"}),
    ],
)
async def test_fields_of_the_route_hold_in_its_formats(
    pplx: Served, fields: dict[str, Any], same: dict[str, Any]
) -> None:
    form = {"encoding_format": "base64_int8"}
    got, wanted = [values(await pplx.embed(body | form), "<i1") for body in (fields, same)]
    np.testing.assert_array_equal(got, wanted)


async def test_ids_come_as_blocks(pplx: Served) -> None:
    blocks = {
        "input_ids": np.array([1, 2, 3, 4, 5, 6], "<i4").tobytes(),
        "lengths": np.array([3, 1, 2], "<i4").tobytes(),
    }
    reply = await pplx.pack({**blocks, "encoding_format": "base64_int8"})
    wanted = values(await pplx.embed({"input": ROWS, "encoding_format": "base64_int8"}), "<i1")
    np.testing.assert_array_equal(values(reply, "<i1"), wanted)
    counts = np.ones(513, "<i4").tobytes()
    many = await pplx.pack({"input_ids": counts, "lengths": counts, "encoding_format": "base64_int8"})
    item = detail(many)
    assert "input_ids has 513 items" in item["msg"]
    assert item["loc"] == ["body", "input_ids"]


async def test_texts_and_msgpack(pplx: Served) -> None:
    reply = await pplx.pack({"input": "hello", "encoding_format": "base64_int8"})
    assert reply.headers["Content-Type"] == "application/msgpack"
    wanted = np.rint(np.tanh(fake_vector(text_ids("hello"), 16)) * 127)
    np.testing.assert_array_equal(values(reply, "<i1"), [wanted])


@pytest.mark.parametrize(
    ("fields", "field", "kind", "words"),
    [
        ({"input": ""}, "input", "invalid_value", "empty string"),
        ({"input": ["a", ""]}, "input", "invalid_value", "input[1]"),
        ({"input": ["a"] * 513}, "input", "invalid_value", "513 items; this server takes at most 512"),
        ({"input": "a" * 600}, "input", "context_length_exceeded", "602 tokens"),
        ({"input": ["a" * 400] * 300}, "input", "context_length_exceeded", "120600 tokens in all"),
        ({"input": "a", "dimensions": 17}, "dimensions", "invalid_value", "17"),
        ({"input": "a", "dimensions": 12}, "dimensions", "invalid_value", "base64_binary packs 8 values"),
        ({"input": "a", "dimensions": 12}, "dimensions", "invalid_value", "12 dimensions do not fill bytes"),
        ({"input": "a", "output_dimension": 12}, "output_dimension", "invalid_value", "12 dimensions"),
        ({"input": "a", "model": "x"}, "model", "model_not_found", "'x'"),
    ],
)
async def test_what_is_wrong_is_told_in_its_shape(
    pplx: Served, fields: dict[str, Any], field: str, kind: str, words: str
) -> None:
    status = 404 if kind == "model_not_found" else 422
    item = detail(await pplx.embed({"encoding_format": "base64_binary", **fields}), status)
    assert (item["loc"], item["type"]) == (["body", field], kind)
    assert words in item["msg"]


@pytest.fixture
async def own(tokenizer: HuggingFaceTokenizer) -> AsyncIterator[Served]:
    options = GatewayOptions(api_dialect="perplexity", perplexity_max_items=2)
    info = fake_info(has_int8=True)
    async with serving(options, engine=FakeEngine(info=info), tokenizer=tokenizer) as server:
        yield server


async def test_the_dialect_can_be_the_server_s_own(own: Served) -> None:
    got = values(await own.embed({"input": [1, 2]}), "<i1")
    np.testing.assert_array_equal(got, [np.rint(np.tanh(fake_vector([1, 2])) * 127)])
    assert "3 items" in detail(await own.embed({"input": ["a", "b", "c"]}))["msg"]
    assert detail(await own.embed({"input": 5}))["loc"] == ["body", "input"]
    assert detail(await own.embed([]))["loc"] == ["body"]
    floats = await own.embed({"input": [1, 2], "encoding_format": "float"})
    assert isinstance(floats.value["data"][0]["embedding"], list)


@pytest.mark.parametrize("encoding_format", ["float", "base64", "bytes"])
async def test_who_names_another_format_is_told_errors_as_openai_does(
    own: Served, encoding_format: str
) -> None:
    reply = await own.embed({"input": "", "encoding_format": encoding_format})
    assert (reply.status, reply.value["error"]["param"]) == (400, "input")


async def test_models_that_take_no_mean_embed_no_chunks(tokenizer: HuggingFaceTokenizer) -> None:
    info = replace(fake_info(dimensions=16), pooling="cls")
    async with serving(engine=FakeEngine(info=info), tokenizer=tokenizer) as server:
        item = detail(await server.embed({"input": [["a", "b"], ["c"]]}, path=CONTEXT))
    assert (item["type"], item["loc"]) == ("not_supported", ["body", "model"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "input"),
        ({"input": "a"}, "$.input"),
        ({"input": []}, "empty list"),
        ({"input": [["a"], []]}, "input[1] is empty"),
        ({"input": [["a", ""]]}, "input[0][1] is empty"),
        ({"input": [["a"]] * 513}, "513 items"),
        ({"input": [["a"] * 40] * 401}, "16040 chunks"),
        ({"input": [["a"]], "encoding_format": "float"}, "encoding_format is 'float'"),
    ],
)
async def test_bad_contextual_requests_are_told_what_is_wrong(
    pplx: Served, fields: dict[str, Any], words: str
) -> None:
    assert words in detail(await pplx.embed(fields, path=CONTEXT))["msg"]
