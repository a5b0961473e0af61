"""/v1/sequences: all that a gateway asks of an engine, over the wire and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.replicas import wire
from rose.batch import EngineInfo, Int32, RaggedBatch, RaggedIds, TokenOutput
from tests.fakes import FakeEngine, fake_info, fake_tokens, fake_vectors
from tests.http.served import Reply, Served, serving

SEQUENCES = RaggedIds.of([np.array(ids, np.int32) for ids in ([1, 2, 3], [4], [5, 6])])
KINDS: frozenset[TokenOutput] = frozenset(("lexical", "hidden"))
INFO = replace(fake_info(has_int8=True, token_outputs={"lexical": 1, "hidden": 4}), type_vocab_size=2)
TYPES: list[Int32 | None] = [np.array([0, 1, 1], np.int32), None, np.array([1, 0], np.int32)]
SPANS: list[Int32 | None] = [np.array([[0, 1], [1, 3]], np.int32), None, np.array([[0, 2]], np.int32)]


async def send(server: Served, body: bytes | dict[str, Any]) -> Reply:
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return await server.send("POST", wire.PATH, data=data, headers={"Content-Type": "application/msgpack"})


@pytest.mark.parametrize("types", [None, TYPES])
@pytest.mark.parametrize("spans", [None, SPANS])
@pytest.mark.parametrize("kinds", [frozenset(), KINDS])
async def test_what_is_asked_over_the_wire_is_what_the_engine_gives(
    types: list[Int32 | None] | None, spans: list[Int32 | None] | None, kinds: frozenset[TokenOutput]
) -> None:
    batch = RaggedBatch.pack(SEQUENCES, types, spans, kinds)
    async with serving(engine=FakeEngine(info=INFO)) as server:
        reply = await send(server, wire.ask(SEQUENCES, types, spans, kinds))
    assert reply.status == 200, reply.body
    rows = wire.read_answer(reply.body, batch.num_rows, batch.num_tokens, INFO)
    wanted = fake_vectors(batch, INFO.dimensions)
    np.testing.assert_array_equal(rows.vectors, wanted)
    np.testing.assert_array_equal(rows.int8, np.rint(np.tanh(wanted) * 127).astype(np.int8))
    assert rows.tokens.keys() == kinds
    for kind, values in rows.tokens.items():
        np.testing.assert_array_equal(values, fake_tokens(batch, kind, INFO.token_outputs[kind]))


def block(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


IDS = {"input_ids": block(1, 2, 3), "lengths": block(2, 1)}
SPAN = {"spans": block(0, 1), "span_counts": block(0, 1)}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "missing required field `input_ids`"),
        ({"input_ids": b"abc"}, "input_ids has 3 bytes"),
        ({"input_ids": block(30_000)}, "takes 0 to 29999"),
        ({"input_ids": block(*[1] * 513)}, "a sequence has 513 tokens; this model takes at most 512"),
        ({**IDS, "token_type_ids": block(1, 1)}, "token_type_ids has 8 bytes; it must hold 3 int32 values"),
        ({**IDS, "token_type_ids": block(0, 2, 0)}, "takes 0 to 1"),
        ({**IDS, "spans": block(0), "span_counts": block(0, 1)}, "spans has 4 bytes; it must hold 2"),
        ({**IDS, "spans": block(0, 2), "span_counts": block(0, 1)}, "do not lie within a sequence of 1"),
        ({**IDS, "spans": block(0, 1), "span_counts": block(-1, 2)}, "span_counts has -1"),
        ({**IDS, "spans": block(0, 1)}, "span_counts is missing; spans and span_counts go together"),
        ({**IDS, "span_counts": block(0, 1)}, "spans is missing"),
        ({**IDS, "token_outputs": ["multi_vector"]}, "gives no 'multi_vector' of a token"),
    ],
)
async def test_what_cannot_be_run_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    async with serving(engine=FakeEngine(info=INFO)) as server:
        reply = await send(server, body)
        assert (reply.status, words in reply.error["message"]) == (400, True), reply.error
        assert not server.engine.batches


@pytest.mark.parametrize(
    ("info", "more", "words"),
    [
        (replace(INFO, type_vocab_size=0), {"token_type_ids": block(0, 0, 0)}, "has no token types"),
        (replace(INFO, pooling="cls"), SPAN, "gives no means of spans"),
    ],
)
async def test_what_the_model_does_not_have_is_refused(
    info: EngineInfo, more: dict[str, bytes], words: str
) -> None:
    async with serving(engine=FakeEngine(info=info)) as server:
        reply = await send(server, {**IDS, **more})
        assert (reply.status, reply.error["code"]) == (400, "not_supported")
        assert words in reply.error["message"]


@pytest.mark.parametrize("change", ["rows", "dimensions", "int8", "tokens"])
async def test_an_answer_of_another_shape_is_not_taken(change: str) -> None:
    async with serving(engine=FakeEngine(info=INFO)) as server:
        body = (await send(server, wire.ask(SEQUENCES, None, None, KINDS))).body
    others = {"dimensions": replace(INFO, dimensions=9), "int8": replace(INFO, has_int8=False)}
    num_rows, num_tokens = 3 + (change == "rows"), 6 + (change == "tokens")
    with pytest.raises(ValueError, match=r"rows|reshape"):
        wire.read_answer(body, num_rows, num_tokens, others.get(change, INFO))
