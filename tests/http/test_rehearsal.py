"""Requests that are answered once more for nobody, while their step runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from gateway.exchange import PLAIN_ROUTES, PlainRequest, PlainRoutes
from gateway.options import GatewayOptions
from gateway.rehearsal import RequestRehearsal
from tests.fakes import fake_info
from tests.http.express_way import Way, opened, quiet, request

BLOCK = {"input_ids": np.arange(1, 21, dtype="<i4").tobytes(), "lengths": np.array([8, 12], "<i4").tobytes()}
IDS = request(BLOCK, media="msgpack")
LEFT_S = 1.0


@asynccontextmanager
async def rehearsed(**options: Any) -> AsyncIterator[tuple[Way, RequestRehearsal]]:
    """A server whose steps end only when `way.engine.finish` says so, and what rehearses its requests."""
    async with opened(short=True, service_s=None, **options) as way:
        routes = way.runner.app[PLAIN_ROUTES]
        rehearsal = await RequestRehearsal.start(GatewayOptions(**options), way.engine.info, routes)
        try:
            yield way, rehearsal
        finally:
            await rehearsal.close()
            assert routes.newest is None and not routes.keeps_newest


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(way: Way, *pieces: bytes) -> None:
    way.feed(*pieces)
    await turns()


async def test_a_request_under_way_is_answered_for_nobody() -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, IDS)
        for number in range(1, 4):
            rehearsal.run(LEFT_S)
            rehearsal.run(LEFT_S)  # the first is not done
            await turns()
            assert rehearsal.answers == number
        assert way.wire.written == b""
        assert (way.batcher.metrics.accepted, len(way.engine.batches)) == (1, 1)
        way.engine.finish()
        await quiet(way)
        assert way.wire.written.startswith(b"HTTP/1.1 200 OK") and way.wire.written.count(b"HTTP/1.1") == 1
        rehearsal.run(LEFT_S)  # nothing is under way
        await turns()
        assert rehearsal.answers == 3


async def test_with_a_key() -> None:
    async with rehearsed(api_keys=("secret",)) as (way, rehearsal):
        await begun(way, request(BLOCK, "Authorization: Bearer secret", media="msgpack"))
        for _ in range(2):
            rehearsal.run(LEFT_S)
            await turns()
        assert rehearsal.answers == 2


async def test_what_is_refused_is_tried_once() -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, request({"input": ["some text", "more"]}, media="msgpack"))
        for _ in range(3):
            rehearsal.run(LEFT_S)
            await turns()
        assert rehearsal.answers == 1
        way.engine.finish()
        await quiet(way)
        await begun(way, IDS)
        rehearsal.run(LEFT_S)
        await turns()
        assert rehearsal.answers == 2


async def test_vectors_of_tokens_are_not_rehearsed(caplog: pytest.LogCaptureFixture) -> None:
    info = fake_info(token_outputs={"multi_vector": 4})
    head, _, body = request({**BLOCK, "outputs": ["multi_vector"]}, media="msgpack").partition(b"\r\n\r\n")
    routes = PlainRoutes({}, 0)
    rehearsal = await RequestRehearsal.start(GatewayOptions(), info, routes)
    routes.newest = PlainRequest(head + b"\r\n\r\n", body)
    for _ in range(3):
        rehearsal.run(LEFT_S)
        await turns()
    assert (rehearsal.answers, caplog.records) == (1, [])
    await rehearsal.close()


@pytest.mark.parametrize(
    "wire",
    [request({"input": [5, 6, 7]}), request({**BLOCK, "user": "x" * (1 << 16)}, media="msgpack")],
    ids=["json", "large"],
)
async def test_only_small_requests_in_msgpack(wire: bytes) -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, wire)
        assert way.runner.app[PLAIN_ROUTES].newest is None
        rehearsal.run(LEFT_S)
        await turns()
        assert rehearsal.answers == 0


async def test_not_of_many_texts() -> None:
    """Which take long: they are refused before the first of them is looked at."""
    many = {"input_ids": np.arange(1, 1001, dtype="<i4").tobytes(), "lengths": np.ones(1000, "<i4").tobytes()}
    async with rehearsed() as (way, rehearsal):
        await begun(way, request(many, media="msgpack"))
        for _ in range(3):
            rehearsal.run(LEFT_S)
            await turns()
        assert (rehearsal.answers, rehearsal._batcher.metrics.accepted) == (1, 0)


async def test_one_that_took_long_for_once_is_tried_again() -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, IDS)
        rehearsal._took_s = 2 * LEFT_S
        for _ in range(300):
            rehearsal.run(LEFT_S)
        await turns()
        assert rehearsal.answers == 0  # what always takes that long delays few
        for _ in range(100):
            rehearsal.run(LEFT_S)
            await turns()
        assert rehearsal.answers > 0


async def test_a_connection_that_ends_without_an_answer_is_no_end() -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, IDS)
        with patch("gateway.express.ExpressConnection._write", side_effect=RuntimeError("broken")):
            rehearsal.run(LEFT_S)
            await turns()
        assert rehearsal.answers == 0
        rehearsal.run(LEFT_S)
        await turns()
        assert rehearsal.answers == 1


async def test_without_a_loopback_nothing_is_started() -> None:
    tasks = asyncio.all_tasks()
    with (
        patch("gateway.rehearsal._Loopback", side_effect=OSError("no loopback")),
        pytest.raises(OSError, match="no loopback"),
    ):
        await RequestRehearsal.start(GatewayOptions(), fake_info(), PlainRoutes({}, 0))
    assert asyncio.all_tasks() == tasks


async def test_not_when_it_could_delay_the_result() -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, IDS)
        rehearsal.run(0.0)
        await turns()
        assert rehearsal.answers == 1  # how long it takes is not known yet
        rehearsal.run(0.0)
        await turns()
        assert rehearsal.answers == 1
        rehearsal.run(LEFT_S)
        await turns()
        assert rehearsal.answers == 2


async def test_an_idle_connection_that_was_closed_is_replaced() -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, IDS)
        first = rehearsal._connection
        for number in (1, 2):
            rehearsal.run(LEFT_S)
            await turns()
            assert rehearsal.answers == number
            rehearsal._nowhere.close()
        assert rehearsal._connection is not first
        assert rehearsal._runner.server is not None
        assert len(rehearsal._runner.server.connections) == 1


async def test_a_fault_ends_it_and_nothing_else() -> None:
    async with rehearsed() as (way, rehearsal):
        await begun(way, IDS)
        with patch.object(rehearsal._loopback, "carry", side_effect=RuntimeError("broken")):
            rehearsal.run(LEFT_S)
        rehearsal.run(LEFT_S)
        await turns()
        assert rehearsal.answers == 0
        way.engine.finish()
        await quiet(way)
        assert way.wire.written.startswith(b"HTTP/1.1 200 OK")


async def test_of_several_requests_the_newest_and_only_while_it_lasts() -> None:
    async with rehearsed() as (way, _):
        routes = way.runner.app[PLAIN_ROUTES]
        other = Way(way.runner, way.engine, way.batcher)
        await begun(way, IDS)
        older = routes.newest
        await begun(other, request({"input_ids": BLOCK["input_ids"]}, media="msgpack"))
        assert routes.newest is not None and routes.newest is not older
        other.protocol.connection_lost(None)  # its client leaves
        await turns()
        assert routes.newest is None
        way.engine.finish()
        await quiet(way)
        assert way.wire.written.startswith(b"HTTP/1.1 200 OK")
