"""A thousand clients that leave at a random moment: nothing of theirs stays, and others never notice."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import Counter
from random import Random

import numpy as np
import pytest

from gateway.options import GatewayOptions
from rose.batch import RaggedBatch
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info
from tests.http.served import Served, byte_tokenizer, expected, serving, until
from tests.wire import post, read_answer

pytestmark = pytest.mark.timeout(110)

CLIENTS, AT_ONCE, ITEMS, FIRST = 1000, 48, 12, 10_000
END = b"\r\n\r\n"
# Where a client is when it leaves. "head" and "body": it has sent a part. "queued", "running": its answer is
# not made. "writing": it has read a part of its answer.
MOMENTS = ("connected", "head", "body", "queued", "running", "tokenising", "writing", "answered")
WIDTH = 1024  # 12 vectors are 250 KB of JSON: more than a small window takes
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: a reset in place of a farewell


class Recording(FakeEngine):
    """2 ms a step. started: which clients' sequences a step was given, by their first id."""

    def __init__(self) -> None:
        info = fake_info(dimensions=WIDTH, max_batch_seqs=16)
        super().__init__(info=info, service_s=0.002)
        self.started: Counter[int] = Counter()

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        self.started.update(batch.input_ids[batch.cu_seqlens[:-1]].tolist())
        return super().step(batch)


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=sock, limit=4096)


def leave(writer: asyncio.StreamWriter, random: Random) -> None:
    """Close, or abort as a killed process does."""
    if random.random() < 0.5:
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    writer.close()


def request(number: int, moment: str, random: Random) -> bytes:
    """What this client sends: its sequences begin with its number, above all that others use."""
    if moment == "tokenising":
        return post({"input": "word " * 60_000, "truncate": True})
    data = post({"input": [[FIRST + number, item] for item in range(ITEMS)]})
    head_bytes = data.index(END) + len(END)
    if moment == "head":
        return data[: random.randrange(1, head_bytes)]
    if moment == "body":
        return data[: random.randrange(head_bytes, len(data) - 1)]
    return b"" if moment == "connected" else data


async def visit(server: Served, engine: Recording, number: int, moment: str, random: Random) -> None:
    reader, writer = await connect(server.port)
    writer.write(request(number, moment, random))
    if moment == "writing":
        await reader.readexactly(random.randrange(1, 30_000))
    elif moment == "answered":
        assert (await read_answer(reader)).status == 200
    elif moment == "running":
        await until(lambda: engine.started[FIRST + number] > 0)
    else:
        await asyncio.sleep(random.random() * 0.05)
    leave(writer, random)


def assert_nothing_is_left(server: Served) -> None:
    metrics = server.batcher.metrics
    assert (metrics.waiting_seqs, metrics.waiting_tokens) == (0, 0)
    assert (metrics.running_batches, metrics.running_seqs) == (0, 0)
    assert metrics.accepted == metrics.completed + metrics.cancelled


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3, 4))])
async def test_a_thousand_clients_that_leave_leave_nothing_behind(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, room = Recording(), asyncio.Semaphore(AT_ONCE)
    async with serving(GatewayOptions(), engine=engine, tokenizer=byte_tokenizer()) as server:
        await server.embed({"input": [1]})
        tasks = len(asyncio.all_tasks())

        async def come(number: int) -> None:
            random = Random(seed * CLIENTS + number)
            async with room:
                await visit(server, engine, number, random.choice(MOMENTS), random)

        await asyncio.gather(*map(come, range(CLIENTS)))
        await until(lambda: server.connections <= 1 and server.batcher.metrics.running_batches == 0)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert_nothing_is_left(server)
        page = (await server.send("GET", "/metrics")).body.decode()
        assert "\nivy_requests_outstanding 0\n" in page
        reply = await server.embed({"input": [[5, 6], [7]]})
        wanted = [expected(ids, WIDTH, width=WIDTH) for ids in ([5, 6], [7])]
        np.testing.assert_allclose(reply.vectors, wanted, rtol=1e-5, atol=1e-6)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_nothing_queued_of_those_who_left_reaches_the_engine() -> None:
    engine = FakeEngine(service_s=None)
    options = SchedulerOptions(min_budget_tokens=8, max_budget_tokens=8)
    async with serving(engine=engine, scheduling=options) as server:
        running = [asyncio.create_task(server.embed({"input": [n] * 8})) for n in range(2)]
        await until(lambda: len(engine.running) == 2)
        queued = [await connect(server.port) for _ in range(200)]
        for number, (_, writer) in enumerate(queued):
            writer.write(post({"input": [[FIRST + number] * 8, [FIRST]]}))
        await until(lambda: server.batcher.metrics.waiting_seqs == 400)
        for number, (_, writer) in enumerate(queued):
            leave(writer, Random(number))
        await until(lambda: server.batcher.metrics.waiting_seqs == 0)
        while engine.running:
            engine.finish()
            await asyncio.sleep(0.001)
        assert [reply.status for reply in await asyncio.gather(*running)] == [200, 200]
        assert len(engine.batches) == 2
        assert_nothing_is_left(server)
