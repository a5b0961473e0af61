"""Many clients at once, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from gateway.tokenization.base import SpecialTokens
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Int32
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine
from tests.http.served import PATHS, Served, expected, serving, text_ids, until


async def test_200_clients_with_their_own_texts_get_their_own_answers(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    choose = random.Random(0)
    texts = [f"client {number} " + "x" * choose.randrange(450) for number in range(200)]
    async with serving(engine=FakeEngine(service_s=0.001), tokenizer=tokenizer) as server:

        async def client(text: str) -> None:
            for _ in range(3):
                reply = await server.embed({"input": text})
                np.testing.assert_allclose(reply.vectors, [expected(text_ids(text))], rtol=1e-6)

        async with asyncio.timeout(30):
            await asyncio.gather(*map(client, texts))
    assert max(batch.num_seqs for batch in server.engine.batches) > 1


async def test_texts_beside_the_loop_and_on_it_are_the_same(tokenizer: HuggingFaceTokenizer) -> None:
    async with serving(tokenizer=tokenizer) as server:
        texts = ["y" * length for length in (1, 100, 400, 500)]
        single = [(await server.embed({"input": text})).vectors[0] for text in texts]
        together = (await server.embed({"input": texts * 10})).vectors
    np.testing.assert_array_equal(together, single * 10)


async def leave(server: Served, body: object, sent: bool) -> asyncio.StreamWriter:
    """Open a connection and send a request over it: the whole, or all but its last byte."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = json.dumps(body).encode()
    head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + (data if sent else data[:-1]))
    await writer.drain()
    return writer


async def test_a_client_that_leaves_frees_its_place() -> None:
    engine = FakeEngine(service_s=None)
    scheduling = SchedulerOptions(max_in_flight=1, max_waiting_seqs=10)
    async with serving(engine=engine, scheduling=scheduling) as server:
        running = asyncio.ensure_future(server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        leavers = [await leave(server, {"input": [[7], [8]]}, sent=True) for _ in range(5)]
        await until(lambda: server.batcher.metrics.waiting_seqs == 10)
        assert (await server.embed({"input": [2]})).status == 429
        for writer in leavers:
            writer.close()
        await until(lambda: server.batcher.metrics.waiting_seqs == 0)
        assert server.batcher.metrics.cancelled == 5
        engine._service_s = 0.0
        engine.finish()
        assert (await running).status == 200
        await server.assert_works()
        assert [batch.num_seqs for batch in engine.batches] == [1, 1]


async def test_a_client_that_leaves_while_sending_harms_nobody(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        (await leave(server, {"input": "a"}, sent=False)).close()
    await server.assert_works()
    await until(lambda: server.connections == 1)
    assert not caplog.records
    assert len(server.engine.batches) == 1


class GatedTokenizer:
    """One id a character, and not before the gate opens."""

    vocab_size, speedup = 10, 1
    special_tokens = SpecialTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        self.entered.set()
        assert self.gate.wait(10)
        return [np.ones(len(text), np.int32) for text in texts]


async def test_a_client_that_leaves_while_its_text_is_tokenised_is_not_computed() -> None:
    tokenizer = GatedTokenizer()
    async with serving(tokenizer=tokenizer) as server:
        writer = await leave(server, {"input": "z" * 400}, sent=True)
        await until(tokenizer.entered.is_set)
        writer.close()
        await until(lambda: server.connections == 0)
        tokenizer.gate.set()
        await server.assert_works()
        assert (await server.embed({"input": "y" * 400})).status == 200  # the thread is free again
        assert server.batcher.metrics.accepted == 2
