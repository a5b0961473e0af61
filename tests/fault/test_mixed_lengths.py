"""Short, long, exactly full, too long and far too long, in any order: each gets its own answer, in order."""

from __future__ import annotations

import asyncio
from itertools import islice, permutations

import numpy as np
import pytest

from gateway.options import GatewayOptions
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info, fake_vector
from tests.http.served import Reply, Served, serving

pytestmark = pytest.mark.timeout(60)

MODEL_LEN, BATCH_TOKENS, BUDGET, REQUEST_TOKENS = 64, 64, 32, 200
# Tokens of each sequence of a request, and the answer's status.
KINDS = {
    "short": ([2], 200),
    "long": ([MODEL_LEN - 1], 200),
    "full": ([MODEL_LEN], 200),
    "one too many": ([MODEL_LEN + 1], 400),
    "far too long": ([10 * MODEL_LEN], 400),
    "over the budget": ([BUDGET + 1, BUDGET, 1], 200),
    "many": ([1] * 40, 200),
    "over the request's limit": ([MODEL_LEN] * 4, 400),
}


async def ask(server: Served, first: int, lengths: list[int]) -> Reply:
    return await server.embed({"input": [[first + row] * length for row, length in enumerate(lengths)]})


def launched(engine: FakeEngine) -> list[int]:
    """The first ids of all sequences, in the order in which the engine got them."""
    return [int(batch.input_ids[start]) for batch in engine.batches for start in batch.cu_seqlens[:-1]]


# All 40 320 orders take minutes.
@pytest.mark.parametrize("step", [199, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
async def test_every_order_of_lengths_is_answered_in_order(step: int) -> None:
    engine = FakeEngine(info=fake_info(max_batch_tokens=BATCH_TOKENS, max_batch_seqs=8), service_s=0.0)
    scheduling = SchedulerOptions(min_budget_tokens=BUDGET, max_budget_tokens=BUDGET)
    options = GatewayOptions(max_request_tokens=REQUEST_TOKENS)
    async with serving(options, engine=engine, scheduling=scheduling) as server:
        for order in islice(permutations(KINDS), 0, None, step):
            engine.batches.clear()
            async with asyncio.timeout(5):
                asked = [
                    asyncio.create_task(ask(server, 1000 * place, KINDS[kind][0]))
                    for place, kind in enumerate(order)
                ]
                replies = await asyncio.gather(*asked)
            for place, (kind, reply) in enumerate(zip(order, replies, strict=True)):
                lengths, status = KINDS[kind]
                assert reply.status == status, (kind, reply.body)
                if status == 200:
                    ids = [[1000 * place + row] * length for row, length in enumerate(lengths)]
                    vectors = np.stack([fake_vector(row) for row in ids])
                    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                    np.testing.assert_allclose(reply.vectors, vectors, rtol=1e-5)
            firsts = launched(engine)
            for place in range(len(order)):  # of one request they keep their order
                own = [first for first in firsts if first // 1000 == place]
                assert own == sorted(own)
            assert all(batch.num_tokens <= BATCH_TOKENS for batch in engine.batches)
        assert server.batcher.metrics.waiting_seqs == 0


async def test_batches_are_filled_first_come_first_served_whatever_the_lengths() -> None:
    """Requests that were accepted one after another reach the engine so, a long one before a short one."""
    engine = FakeEngine(info=fake_info(max_batch_tokens=BATCH_TOKENS, max_batch_seqs=8), service_s=None)
    scheduling = SchedulerOptions(min_budget_tokens=BUDGET, max_budget_tokens=BUDGET)
    lengths = [MODEL_LEN, 1, BUDGET, MODEL_LEN, 2, 2, MODEL_LEN - 1, BUDGET + 1, 1] * 3
    async with serving(engine=engine, scheduling=scheduling) as server:
        asked = []
        for number, length in enumerate(lengths):
            accepted = server.batcher.metrics.accepted
            asked.append(asyncio.create_task(ask(server, 100 + number, [length])))
            async with asyncio.timeout(5):
                while server.batcher.metrics.accepted == accepted:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        async with asyncio.timeout(10):
            while not all(request.done() for request in asked):
                if engine.running:
                    engine.finish()
                await asyncio.sleep(0)
        assert {(await request).status for request in asked} == {200}
        assert launched(engine) == [100 + number for number in range(len(lengths))]
