"""Cohere's embed routes: a list for each type, and a message for each error."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.routes import cohere
from tests.http.served import Served, expected, text_ids

TEXTS = ["hello", "world"]
ROWS = [text_ids(text) for text in TEXTS]


async def test_floats_by_default(server: Served) -> None:
    body = {"texts": TEXTS, "model": "fake", "input_type": "search_document"}
    reply = await server.embed(body, path="/v2/embed")
    assert reply.status == 200, reply.body
    np.testing.assert_allclose(reply.value["embeddings"]["float"], [expected(row) for row in ROWS], rtol=1e-6)
    assert reply.value["texts"] == TEXTS
    assert reply.value["meta"]["billed_units"] == {"input_tokens": sum(map(len, ROWS))}
    assert reply.value["meta"]["api_version"] == {"version": "2"}


async def test_v1_gives_a_bare_list_unless_types_are_named(server: Served) -> None:
    bare = await server.embed({"texts": TEXTS}, path="/v1/embed")
    np.testing.assert_allclose(bare.value["embeddings"], [expected(row) for row in ROWS], rtol=1e-6)
    assert bare.value["response_type"] == "embeddings_floats"
    typed = await server.embed({"texts": TEXTS, "embedding_types": ["float"]}, path="/v1/embed")
    assert typed.value["embeddings"]["float"] == bare.value["embeddings"]
    assert typed.value["response_type"] == "embeddings_by_type"


@pytest.mark.parametrize("codec", ["application/json", "application/msgpack"])
async def test_every_type(server: Served, codec: str) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"texts": TEXTS, "embedding_types": types}
    reply = await server.embed(body, path="/v2/embed", headers={"Accept": codec})
    given = reply.value["embeddings"]
    floats = np.array(given["float"], np.float32)
    np.testing.assert_allclose(floats, [expected(row) for row in ROWS], rtol=1e-6)
    scaled = np.rint(floats / np.abs(floats).max(axis=1, keepdims=True) * 127)
    np.testing.assert_array_equal(given["int8"], scaled)
    np.testing.assert_array_equal(given["uint8"], scaled + 128)
    bits = np.packbits(floats >= 0, axis=1)
    np.testing.assert_array_equal(given["ubinary"], bits)
    np.testing.assert_array_equal(given["binary"], bits.astype(int) - 128)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in given["base64"]]
    np.testing.assert_array_equal(decoded, floats)


async def test_a_type_that_is_named_often_is_encoded_once(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    real = cohere._list

    async def counted(embedded: Any, dtype: Any, name: str, media: Any) -> Any:
        encoded.append(name)
        return await real(embedded, dtype, name, media)

    monkeypatch.setattr(cohere, "_list", counted)
    body = {"texts": TEXTS, "embedding_types": ["float", "int8"] * 1000}
    reply = await server.embed(body, path="/v2/embed")
    assert (encoded, list(reply.value["embeddings"])) == (["float", "int8"],) * 2


@pytest.mark.parametrize(
    ("truncate", "kept"), [(None, "a" * 510), ("END", "a" * 510), ("START", "a" * 420 + "b" * 90)]
)
async def test_long_texts_are_cut_as_told(server: Served, truncate: str | None, kept: str) -> None:
    body = {"texts": ["a" * 600 + "b" * 90], "truncate": truncate}
    reply = await server.embed(body, path="/v2/embed")
    np.testing.assert_allclose(reply.value["embeddings"]["float"], [expected(text_ids(kept))], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, 400, "texts is missing"),
        ({"texts": []}, 400, "texts is an empty list"),
        ({"texts": ["a", ""]}, 400, "texts[1] is empty"),
        ({"texts": ["a" * 600], "truncate": "NONE"}, 400, "texts[0] has 602 tokens"),
        (
            {"texts": ["a" * 600], "truncate": "NONE"},
            400,
            '(send "truncate": "END" or "START" to have it cut)',
        ),
        ({"texts": ["a"], "truncate": "MIDDLE"}, 400, "truncate is 'MIDDLE'"),
        ({"texts": ["a"], "input_type": "qeury"}, 400, "input_type is 'qeury'"),
        ({"texts": ["a"], "embedding_types": ["float", "int4"]}, 400, "embedding_types has 'int4'"),
        ({"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 7}, 400, "7 dimensions"),
        ({"texts": ["a"], "output_dimension": 9}, 400, "output_dimension is 9"),
        ({"texts": ["a"], "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"images": ["data:image/png;base64,"]}, 400, "this server embeds text"),
        ({"inputs": [{"content": []}]}, 400, "this server embeds text"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}] * 2}]}, 400, "one an input"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "embeds text"),
        ({"inputs": [{"content": [{"type": "text", "text": ""}]}]}, 400, "inputs[0] is empty"),
        ({"inputs": []}, 400, "inputs is an empty list"),
        ({"inputs": [{"content": "a"}]}, 400, "$.inputs[0].content"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, 400, "both given"),
        ({"texts": ["a"], "model": "embed-v4.0"}, 404, "'embed-v4.0'"),
    ],
)
async def test_bad_requests_are_a_message(
    server: Served, fields: dict[str, Any], status: int, words: str
) -> None:
    reply = await server.embed(fields, path="/v2/embed")
    assert reply.status == status, reply.body
    assert set(reply.value) == {"message"}
    assert words in reply.value["message"]
    assert not server.engine.batches


async def test_texts_as_inputs_of_one_part(server: Served) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    reply = await server.embed({"inputs": inputs}, path="/v2/embed")
    np.testing.assert_allclose(reply.value["embeddings"]["float"], [expected(row) for row in ROWS], rtol=1e-6)
    assert reply.value["texts"] == TEXTS


async def test_msgpack_in(server: Served) -> None:
    headers = {"Content-Type": "application/msgpack"}
    data = msgspec.msgpack.encode({"texts": TEXTS, "inputs": None})
    reply = await server.send("POST", "/v2/embed", data=data, headers=headers)
    np.testing.assert_allclose(reply.value["embeddings"]["float"], [expected(row) for row in ROWS], rtol=1e-6)
