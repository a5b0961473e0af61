"""Every shape of an answer: JSON and msgpack, floats, base64 and blocks, cut and normalised or not."""

from __future__ import annotations

import asyncio
import base64
import itertools
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from rose.batch import Float32
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info
from tests.http.served import PATHS, Reply, Served, expected, serving, until

ROWS = [[1, 2, 3], [4], [5, 6]]
JSON, MSGPACK = "application/json", "application/msgpack"


def read(reply: Reply) -> Float32:
    """f32[n, dim] of an answer in any format."""
    assert reply.status == 200, reply.body
    if reply.headers["Content-Type"] == "application/octet-stream":
        assert reply.headers["x-embedding-dtype"] == "float32"
        shape = [int(size) for size in reply.headers["x-embedding-shape"].split(",")]
        return np.frombuffer(reply.body, "<f4").reshape(shape)
    if "embeddings" in reply.value:
        assert reply.value["dtype"] == "float32"
        return np.frombuffer(reply.value["embeddings"], "<f4").reshape(reply.value["shape"])
    items = [item["embedding"] for item in reply.value["data"]]
    if isinstance(items[0], str):
        return np.array([np.frombuffer(base64.b64decode(item, validate=True), "<f4") for item in items])
    return np.array(items, np.float32)


async def ask(server: Served, sent: str, wanted: str, **fields: Any) -> Reply:
    """ROWS with `fields`, sent in one codec and wanted in another."""
    encode = msgspec.json.encode if sent == JSON else msgspec.msgpack.encode
    headers = {"Content-Type": sent, "Accept": wanted}
    return await server.send("POST", PATHS[0], data=encode({"input": ROWS, **fields}), headers=headers)


@pytest.mark.parametrize("encoding", ["float", "base64", "bytes", None])
@pytest.mark.parametrize(("sent", "wanted"), list(itertools.product((JSON, MSGPACK), repeat=2)))
async def test_every_format_gives_the_same_values(
    server: Served, sent: str, wanted: str, encoding: str | None
) -> None:
    reply = await ask(server, sent, wanted, encoding_format=encoding)
    np.testing.assert_array_equal(read(reply), read(await ask(server, JSON, JSON, encoding_format="base64")))
    np.testing.assert_allclose(read(reply), [expected(row) for row in ROWS], rtol=1e-6)
    octets = encoding == "bytes" and wanted == JSON
    assert reply.headers["Content-Type"] == ("application/octet-stream" if octets else wanted)
    if not octets:
        assert reply.value["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
        assert reply.value["model"] == "fake"
    else:
        assert reply.headers["x-prompt-tokens"] == "6"


async def test_base64_is_four_bytes_a_dimension(server: Served) -> None:
    reply = await ask(server, JSON, JSON, encoding_format="base64", dimensions=5)
    assert [len(base64.b64decode(item["embedding"])) for item in reply.value["data"]] == [20, 20, 20]


async def test_json_is_float_unless_asked_otherwise(server: Served) -> None:
    assert isinstance((await ask(server, JSON, JSON)).value["data"][0]["embedding"], list)


async def test_json_floats_are_the_float32_values_in_few_digits(server: Served) -> None:
    reply = await ask(server, JSON, JSON)
    blocks = read(await ask(server, JSON, JSON, encoding_format="bytes"))
    np.testing.assert_array_equal(read(reply), blocks)
    assert max(len(str(value)) for value in reply.value["data"][0]["embedding"]) <= 14


@pytest.mark.parametrize("normalize", [True, False, None])
@pytest.mark.parametrize("dimensions", [None, 1, 3, 8])
@pytest.mark.parametrize("by_default", [True, False])
async def test_cut_first_then_normalised_when_on(
    by_default: bool, dimensions: int | None, normalize: bool | None
) -> None:
    info = replace(fake_info(), normalize=by_default)
    async with serving(engine=FakeEngine(info=info)) as server:
        reply = await ask(server, JSON, JSON, dimensions=dimensions, normalize=normalize)
        on = by_default if normalize is None else normalize
        rows = [expected(row, dimensions or 8, on) for row in ROWS]
        np.testing.assert_allclose(read(reply), rows, rtol=1e-6)
        if on:
            np.testing.assert_allclose(np.linalg.norm(read(reply), axis=1), 1, atol=1e-6)


async def test_mixed_dimensions_in_one_batch_do_not_mix() -> None:
    engine = FakeEngine(service_s=None)
    async with serving(engine=engine, scheduling=SchedulerOptions(max_in_flight=1)) as server:
        wishes = [{"dimensions": 2}, {"dimensions": 5, "normalize": False}, {}]
        first = asyncio.ensure_future(server.embed({"input": [9]}))
        await until(lambda: len(engine.running) == 1)
        waiting = [asyncio.ensure_future(server.embed({"input": [1, 2, 3], **wish})) for wish in wishes]
        await until(lambda: server.batcher.metrics.waiting_seqs == 3)
        engine.finish()
        await first
        await until(lambda: len(engine.running) == 1)
        assert engine.batches[-1].num_seqs == 3
        engine.finish()
        two, five, whole = [read(await reply) for reply in waiting]
    np.testing.assert_allclose(two, [expected([1, 2, 3], 2)], rtol=1e-6)
    np.testing.assert_allclose(five, [expected([1, 2, 3], 5, normalize=False)], rtol=1e-6)
    np.testing.assert_allclose(whole, [expected([1, 2, 3])], rtol=1e-6)


IDS = np.array([1, 2, 3, 4, 5, 6], "<i4")
LENGTHS = np.array([3, 1, 2], "<i4")


async def test_id_blocks_are_the_same_as_lists(server: Served) -> None:
    blocks = {"input_ids": IDS.tobytes(), "lengths": LENGTHS.tobytes()}
    packed = read(await server.pack(blocks))
    np.testing.assert_allclose(packed, [expected(row) for row in ROWS], rtol=1e-6)
    text = {name: base64.b64encode(block).decode() for name, block in blocks.items()}
    np.testing.assert_array_equal(read(await server.embed({**text, "encoding_format": "base64"})), packed)


async def test_ids_without_lengths_are_one_sequence(server: Served) -> None:
    reply = await server.pack({"input_ids": IDS.tobytes()})
    np.testing.assert_allclose(read(reply), [expected([1, 2, 3, 4, 5, 6])], rtol=1e-6)


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


BAD_BLOCKS = [
    ("no ids", {"input_ids": b""}, "input_ids has 0 bytes"),
    ("half an id", {"input_ids": b"123456"}, "input_ids has 6 bytes"),
    ("lengths without ids", {"input": "a", "lengths": int32(1)}, "lengths is given without input_ids"),
    ("no lengths", {"input_ids": int32(1), "lengths": b""}, "lengths has 0 bytes"),
    ("half a length", {"input_ids": int32(1), "lengths": b"\0\0"}, "lengths has 2 bytes"),
    ("an empty sequence", {"input_ids": int32(1), "lengths": int32(1, 0)}, "lengths[1] is 0"),
    ("a negative length", {"input_ids": int32(1), "lengths": int32(2, -1)}, "lengths[1] is -1"),
    (
        "too few ids",
        {"input_ids": int32(1), "lengths": int32(2)},
        "lengths add up to 2, but input_ids holds 1",
    ),
    ("too many ids", {"input_ids": int32(1, 1), "lengths": int32(1)}, "lengths add up to 1"),
    (
        "lengths beyond int32",
        {"input_ids": int32(1), "lengths": int32(*[2**31 - 1] * 5)},
        f"{5 * (2**31 - 1)}",
    ),
    ("an id too high", {"input_ids": int32(1, 30_000)}, "input_ids[1] is token id 30000"),
    ("a negative id", {"input_ids": int32(1, -7)}, "input_ids[1] is token id -7"),
    ("a list for a block", {"input_ids": [1, 2]}, "$.input_ids"),
    (
        "too many sequences",
        {"input_ids": int32(*[1] * 2049), "lengths": int32(*[1] * 2049)},
        "lengths has 2049",
    ),
    ("too long a sequence", {"input_ids": int32(*[1] * 513)}, "sequence 0 of input_ids has 513 tokens"),
]


@pytest.mark.parametrize(
    ("body", "words"), [case[1:] for case in BAD_BLOCKS], ids=[case[0] for case in BAD_BLOCKS]
)
async def test_bad_blocks_are_refused_by_name(server: Served, body: Any, words: str) -> None:
    reply = await server.pack(body)
    assert reply.status == 400
    assert reply.headers["Content-Type"] == MSGPACK
    assert reply.error["param"] in body
    assert words in reply.error["message"]
    assert not server.engine.batches


@pytest.mark.parametrize(
    ("sent", "accept", "answer"),
    [
        ("application/json", None, JSON),
        ("application/json; charset=utf-8", "*/*", JSON),
        ("APPLICATION/JSON", "application/msgpack", MSGPACK),
        ("application/x-msgpack", None, MSGPACK),
        ("application/vnd.msgpack", "*/*", MSGPACK),
        ("application/msgpack", "application/json", JSON),
        ("application/msgpack", "application/json;q=0.5, application/x-msgpack", MSGPACK),
        ("application/msgpack", "application/json, */*;q=0.1", JSON),
        ("application/json", "text/html", JSON),
        ("application/json", "application/msgpack;q=nonsense", JSON),
    ],
)
async def test_the_codecs_are_chosen_by_the_headers(
    server: Served, sent: str, accept: str | None, answer: str
) -> None:
    body = {"input": [1]}
    data = msgspec.msgpack.encode(body) if "msgpack" in sent else msgspec.json.encode(body)
    headers = {"Content-Type": sent} | ({"Accept": accept} if accept else {})
    reply = await server.send("POST", PATHS[0], data=data, headers=headers, skip_auto_headers=["Accept"])
    assert (reply.status, reply.headers["Content-Type"]) == (200, answer)


async def test_a_body_without_a_type_is_json(server: Served) -> None:
    reply = await server.send("POST", PATHS[0], data=b'{"input":[1]}', skip_auto_headers=["Content-Type"])
    assert reply.status == 200


@pytest.mark.parametrize("encoding", ["float", "base64", "bytes"])
@pytest.mark.parametrize("codec", [JSON, MSGPACK])
async def test_a_large_answer_is_whole_and_in_order(codec: str, encoding: str) -> None:
    """More than one slice of the encoder: 100 rows of 1024 values."""
    async with serving(engine=FakeEngine(info=fake_info(dimensions=1024))) as server:
        rows = [[row, row + 1] for row in range(100)]
        body = {"input": rows, "encoding_format": encoding}
        reply = await server.embed(body, headers={"Accept": codec})
        wanted = [expected(row, 1024, width=1024) for row in rows]
        np.testing.assert_allclose(read(reply), wanted, rtol=1e-5, atol=1e-7)
        if encoding != "bytes":
            assert [item["index"] for item in reply.value["data"]] == list(range(100))
