"""What the embeddings route takes beyond OpenAI's fields: prompts, cuts, number types, others' words."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.dtypes import Dtype, widen
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import BatchResult
from tests.fakes import FakeEngine, fake_info, fake_vector
from tests.http.served import BOS, EOS, Served, expected, serving, text_ids

PROMPTS = {"query": "find: ", "passage": "text: ", "STS": "same? "}


@pytest.fixture
async def prompted(tokenizer: HuggingFaceTokenizer) -> AsyncIterator[Served]:
    info = replace(fake_info(), prompts=PROMPTS)
    async with serving(engine=FakeEngine(info=info), tokenizer=tokenizer) as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, ""),
        ({"prompt_name": "query"}, "find: "),
        ({"prompt_name": "STS"}, "same? "),
        ({"prompt": "own: "}, "own: "),
        ({"prompt": "own: ", "prompt_name": "query"}, "own: "),
        ({"input_type": "query"}, "find: "),
        ({"input_type": "search_query"}, "find: "),
        ({"input_type": "document"}, "text: "),
        ({"input_type": "search_document"}, "text: "),
        ({"input_type": "STS"}, "same? "),
        ({"input_type": "clustering"}, ""),
        ({"input_type": None, "prompt_name": None, "prompt": None}, ""),
    ],
)
async def test_prompts_go_before_texts(prompted: Served, fields: dict[str, Any], prompt: str) -> None:
    reply = await prompted.embed({"input": ["a", "b"], **fields})
    np.testing.assert_allclose(reply.vectors, [expected(text_ids(prompt + text)) for text in "ab"], rtol=1e-6)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
async def test_a_prompt_that_would_become_gigabytes_is_refused(prompted: Served, path: str) -> None:
    """A body of 1 MB, 1 KB compressed, took 11 GB of memory and 40 s before it was refused for its tokens."""
    name = "inputs" if path == "/embed" else "input"
    reply = await prompted.embed({name: ["a"] * 2048, "prompt": "x " * 500_000}, path=path)
    assert 400 <= reply.status < 500
    assert b"prompt has 1000000 characters, and goes with each of 2048 texts" in reply.body
    assert not prompted.engine.batches


async def test_token_ids_go_without_a_prompt(prompted: Served) -> None:
    reply = await prompted.embed({"input": [1, 2], "prompt_name": "query"})
    np.testing.assert_allclose(reply.vectors, [expected([1, 2])], rtol=1e-6)


async def test_the_default_prompt_is_used_unless_another_is_named(tokenizer: HuggingFaceTokenizer) -> None:
    info = replace(fake_info(), prompts=PROMPTS, default_prompt_name="passage")
    async with serving(engine=FakeEngine(info=info), tokenizer=tokenizer) as server:
        for fields, prompt in (({}, "text: "), ({"prompt_name": "query"}, "find: "), ({"prompt": ""}, "")):
            reply = await server.embed({"input": "a", **fields})
            np.testing.assert_allclose(reply.vectors, [expected(text_ids(prompt + "a"))], rtol=1e-6)
        body = {"query": "q", "texts": ["d"]}
        [rank] = (await server.embed(body, path="/rerank")).value
        pair = [expected(text_ids(text)).astype(float) for text in ("find: q", "text: d")]
        assert abs(rank["score"] - float(pair[0] @ pair[1])) < 1e-6


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt_name": "answer"}, "prompt_name", "this model has query, passage, STS"),
        ({"input_type": "qeury"}, "input_type", "this server knows query, search_query"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "give -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "give -1"),
        ({"truncation_direction": "up"}, "truncation_direction", "'up'"),
        ({"embed_dtype": "float8"}, "embed_dtype", "this server knows float, bits, float32, float16"),
        ({"output_dtype": "x"}, "output_dtype", "'x'"),
        ({"embed_dtype": "int8", "output_dtype": "float32"}, "output_dtype", "embed_dtype is int8"),
        ({"dimensions": 3, "output_dimension": 4}, "output_dimension", "dimensions is 3"),
        ({"embed_dtype": "ubinary", "dimensions": 7}, "embed_dtype", "7 dimensions"),
        ({"endianness": "big"}, "endianness", "'big'"),
        ({"modality": "image"}, "modality", "'image'"),
        ({"dimensions": 0}, "dimensions", "dimensions is 0"),
        ({"encoding_format": "xml"}, "encoding_format", "'xml'"),
    ],
)
async def test_wishes_that_nobody_can_grant(
    prompted: Served, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = await prompted.embed({"input": "a", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"truncate_prompt_tokens": -1}, [BOS, *text_ids("a" * 510)[1:-1], EOS]),
        ({"truncate_prompt_tokens": 4}, text_ids("aa")),
        ({"truncate_prompt_tokens": 4, "truncation_direction": "left"}, text_ids("bb")),
        ({"truncation": True}, text_ids("a" * 510)),
        ({"truncate": True, "truncation_direction": "left"}, text_ids("a" * 420 + "b" * 90)),
        ({"truncate": True, "add_special_tokens": False}, text_ids("a" * 512)[1:-1]),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, text_ids("aaa")[1:-1]),
        ({"truncate_prompt_tokens": 9999}, text_ids("a" * 510)),
    ],
)
async def test_cuts(server: Served, fields: dict[str, Any], ids: list[int]) -> None:
    reply = await server.embed({"input": "a" * 600 + "b" * 90, **fields})
    assert reply.status == 200, reply.body
    np.testing.assert_allclose(reply.vectors, [expected(ids)], rtol=1e-6)
    assert reply.value["usage"]["prompt_tokens"] == len(ids)


async def test_text_without_the_template(server: Served) -> None:
    reply = await server.embed({"input": "ab", "add_special_tokens": False})
    np.testing.assert_allclose(reply.vectors, [expected(text_ids("ab")[1:-1])], rtol=1e-6)


async def test_infinity_s_zero_is_all_dimensions(server: Served) -> None:
    body = {"input": [1], "dimensions": 0, "modality": "text", "encoding_format": "float"}
    assert (await server.embed(body, path="/embeddings")).vectors.shape == (1, 8)


async def test_voyage_s_words(server: Served) -> None:
    body = {
        "input": ["a"],
        "input_type": None,
        "truncation": True,
        "output_dimension": 4,
        "output_dtype": None,
    }
    np.testing.assert_allclose((await server.embed(body)).vectors, [expected(text_ids("a"), 4)], rtol=1e-6)
    ints = await server.embed({**body, "output_dimension": None, "output_dtype": "int8"})
    vector = expected(text_ids("a"))
    wanted = np.rint(vector / np.abs(vector).max() * 127)
    np.testing.assert_array_equal(ints.value["data"][0]["embedding"], wanted)


ROWS = [[1, 2, 3], [4], [5, 6]]
STORED = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int8": "<i1",
    "uint8": "<u1",
    "binary": "<i1",
    "ubinary": "<u1",
    "ubinary_little": "<u1",
}


def test_every_type_is_tried() -> None:
    assert set(STORED) == {dtype.value for dtype in Dtype}


@pytest.mark.parametrize("dtype", STORED)
async def test_blocks_of_every_type_hold_the_same_values_in_every_answer(server: Served, dtype: str) -> None:
    body = {"input": ROWS, "embed_dtype": dtype}
    packed = (await server.pack(body)).value
    assert packed["dtype"] == dtype
    block = np.frombuffer(packed["embeddings"], STORED[dtype]).reshape(packed["shape"])
    octets = await server.embed({**body, "encoding_format": "bytes"})
    assert octets.headers["x-embedding-dtype"] == dtype
    assert octets.headers["x-embedding-shape"] == ",".join(map(str, packed["shape"]))
    assert octets.body == packed["embeddings"]
    coded = await server.embed({**body, "encoding_format": "base64"})
    assert b"".join(base64.b64decode(item["embedding"]) for item in coded.value["data"]) == octets.body
    listed = [item["embedding"] for item in (await server.embed(body)).value["data"]]
    np.testing.assert_array_equal(np.array(listed, np.float32), widen(block, Dtype(dtype)).astype(np.float32))


async def test_vllm_s_header_tells_where_each_vector_is(server: Served) -> None:
    for count, encoding in ((3, "bytes"), (48, "bytes_only"), (49, "bytes")):
        body = {
            "input": [[row] for row in range(count)],
            "encoding_format": encoding,
            "embed_dtype": "float16",
        }
        reply = await server.embed({**body, "endianness": "native"})
        metadata = msgspec.json.decode(reply.headers["metadata"])
        assert metadata["usage"]["prompt_tokens"] == count
        assert ("data" in metadata) == (count <= 48)
        for item in metadata.get("data", ()):
            vector = np.frombuffer(reply.body[item["start"] : item["end"]], "<f2")
            assert (item["embed_dtype"], item["endianness"], item["shape"]) == ("float16", "little", [8])
            np.testing.assert_allclose(vector, expected([item["index"]]), rtol=1e-3, atol=1e-6)


async def test_halves_are_rounded_values(server: Served) -> None:
    wanted = np.array([expected(row) for row in ROWS])
    for dtype, relative in (("float16", 2**-11), ("bfloat16", 2**-8)):
        got = (await server.embed({"input": ROWS, "embed_dtype": dtype})).vectors
        np.testing.assert_allclose(got, wanted, rtol=relative, atol=1e-6)
        assert not np.array_equal(got, wanted.astype(np.float32))


async def test_bits_is_another_name(server: Served) -> None:
    packed = (await server.pack({"input": ROWS, "embed_dtype": "bits"})).value
    bits = np.unpackbits(np.frombuffer(packed["embeddings"], np.uint8).reshape(packed["shape"]), axis=1)
    np.testing.assert_array_equal(bits, [fake_vector(row) >= 0 for row in ROWS])
    assert packed["dtype"] == "ubinary"


async def test_what_float16_cannot_hold_is_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.full((1, 8), 1e5, np.float32)
    monkeypatch.setattr(FakeEngine, "_outcome", lambda *_: BatchResult(vectors))
    reply = await server.embed({"input": [1], "embed_dtype": "float16", "normalize": False})
    assert reply.status == 400
    assert "65504" in reply.error["message"]
    assert (await server.embed({"input": [1], "embed_dtype": "bfloat16", "normalize": False})).status == 200


async def test_msgpack_and_json_agree_on_extras(prompted: Served) -> None:
    body = {"input": "a" * 600, "prompt_name": "query", "truncate_prompt_tokens": 9, "embed_dtype": "int8"}
    listed = (await prompted.embed(body)).value["data"][0]["embedding"]
    packed = msgspec.msgpack.decode((await prompted.pack(body)).body)
    assert list(np.frombuffer(packed["embeddings"], np.int8)) == listed
