"""When things come and go on a connection that takes plain requests the short way."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from gateway import express
from gateway.drain import DRAIN
from tests.http.express_way import IDS, PLAIN_IDS, opened, quiet, request
from tests.http.served import Served, serving, until
from tests.wire import read_answer


async def test_a_server_that_shuts_down_refuses_and_closes() -> None:
    answers = []
    for short in (True, False):
        async with opened(short=short) as way:
            await way.batcher.close(0.0)
            answers.append(await way.answer(PLAIN_IDS, PLAIN_IDS))
    assert answers[0] == answers[1]
    assert answers[0].startswith(b"HTTP/1.1 503")
    assert answers[0].count(b"HTTP/1.1") == 1
    assert b"Connection: close" in answers[0]
    assert answers[0].endswith(b"<closed>")


@pytest.mark.parametrize("extra", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", request(IDS) * 3])
async def test_what_is_sent_before_the_answer_is_answered_after_it(extra: bytes) -> None:
    answers = []
    for short in (True, False):
        async with opened(short=short, service_s=None) as way:
            way.feed(PLAIN_IDS)
            await quiet(way, 5)
            way.feed(*[bytes([byte]) for byte in extra])
            async with asyncio.timeout(10):
                while not way.wire.written:
                    way.engine.finish(len(way.engine.running))
                    await asyncio.sleep(0)
            way.engine._service_s = 0.0
            answers.append(await way.answer())
    assert answers[0] == answers[1]
    assert answers[0].count(b"HTTP/1.1 200") == 1 + extra.count(b"HTTP/1.1")


async def test_a_client_that_sends_on_without_end_is_read_no_more() -> None:
    async with opened(short=True, service_s=None) as way:
        way.feed(PLAIN_IDS)
        await quiet(way, 5)
        while not way.wire.paused_reading:
            way.feed(b"a" * 10_000)
            assert sum(map(len, way.protocol._held)) < 100_000
        way.engine.finish()
        assert b" 400 Bad Request" in await way.answer()
        assert not way.wire.paused_reading


@pytest.mark.parametrize("phase", ["gathering", "running", "draining"])
async def test_a_client_may_leave_at_any_time(phase: str) -> None:
    async with opened(short=True, service_s=None, hold_s=0.005) as way:
        if phase == "draining":
            way.protocol.pause_writing()
        way.feed(PLAIN_IDS[:-1] if phase == "gathering" else PLAIN_IDS)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(way.engine.running) == (phase != "gathering")
        if phase == "draining":
            way.engine.finish()
            await until(lambda: way.wire.written != b"")
        way.protocol.connection_lost(None)
        way.wire.closed = True
        await until(lambda: way.protocol._running is None)
        await asyncio.sleep(0.01)  # longer than a body is held
        assert bool(way.wire.written) == (phase == "draining")
        state = [asyncio.all_tasks(), way.protocol._held]
        assert len(state[0]) <= 2, state  # this one and the scheduler's
        assert state[1] == []


async def test_a_body_that_takes_long_is_left_to_aiohttp() -> None:
    async with opened(short=False) as long:
        expected = await long.answer(PLAIN_IDS)
    async with opened(short=True, hold_s=0.005) as way:
        way.feed(PLAIN_IDS[:-4], PLAIN_IDS[-4:-2])
        await until(lambda: not way.express)
        assert way.protocol._held == []
        assert await way.answer(PLAIN_IDS[-2:]) == expected


async def test_a_body_that_came_is_timed_no_more() -> None:
    async with opened(short=True, hold_s=0.005) as way:
        way.feed(PLAIN_IDS[:-4], PLAIN_IDS[-4:])  # in one turn: no timer can fire between them
        await asyncio.sleep(0.01)
        assert way.express
        assert (await way.answer(PLAIN_IDS)).count(b"HTTP/1.1 200") == 2
        assert way.express


async def test_a_client_that_does_not_read_gets_its_next_answer_when_it_does() -> None:
    async with opened(short=True) as way:
        way.protocol.pause_writing()
        way.feed(PLAIN_IDS)
        await until(lambda: way.wire.written != b"")
        way.feed(PLAIN_IDS)
        for _ in range(50):
            await asyncio.sleep(0)
        assert way.wire.written.count(b"HTTP/1.1 200") == 1
        way.protocol.resume_writing()
        assert (await way.answer()).count(b"HTTP/1.1 200") == 2


async def test_a_shutdown_waits_for_the_answer() -> None:
    async with opened(short=True, service_s=None) as way:
        way.feed(PLAIN_IDS)
        await quiet(way, 5)
        closing = asyncio.ensure_future(way.runner.cleanup())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done() and not way.wire.closed
        way.engine.finish()
        async with asyncio.timeout(10):
            await closing
        assert way.wire.written.startswith(b"HTTP/1.1 200")
        assert way.wire.closed


@pytest.mark.parametrize("hold_s", [60.0, 0.05], ids=["held", "handed over"])
async def test_a_shutdown_waits_for_what_is_still_sent(hold_s: float) -> None:
    """Over a socket, and closed behind the drain as a server does it."""
    with patch.object(express, "_HOLD_S", hold_s):
        async with asyncio.timeout(20), serving() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(PLAIN_IDS[:-4])
            await until(lambda: server.connections == 1)
            (connection,) = server._runner.server.connections
            await until(lambda: connection._held or not connection._express)
            closing = asyncio.ensure_future(drained(server))
            await asyncio.sleep(0.2)
            assert not closing.done()
            writer.write(PLAIN_IDS[-4:])
            assert (await read_answer(reader)).status == 200
            await closing
            writer.close()


async def drained(server: Served) -> None:
    """The end of a server."""
    await server.app[DRAIN].run(60.0)
    await server.batcher.close(0.0)
    await server._runner.cleanup()


@pytest.mark.parametrize("end", ["of the body", "of the hold"])
async def test_what_was_let_in_is_answered_while_a_shutdown_refuses_what_comes_later(end: str) -> None:
    async with opened(short=True, hold_s=60.0 if end == "of the body" else 0.05) as way:
        drain, answers = way.runner.app[DRAIN], []
        way.feed(PLAIN_IDS[:-4])
        draining = asyncio.ensure_future(drain.run(60.0))
        await until(lambda: drain.begun and (end == "of the body" or not way.express))
        answers.append(await way.answer(PLAIN_IDS[-4:], PLAIN_IDS))
        await asyncio.wait_for(draining, 10)
    assert answers[0].startswith(b"HTTP/1.1 200")
    assert answers[0].count(b"HTTP/1.1 503") == 1
    assert answers[0].endswith(b"<closed>")


async def test_in_a_shutdown_a_head_is_refused_without_its_body() -> None:
    answers = []
    for short in (True, False):
        async with opened(short=short) as way:
            await way.runner.app[DRAIN].run(0.0)
            way.feed(PLAIN_IDS[:-4])
            await until(lambda way=way: way.wire.written != b"")
            answers.append(await way.answer())
    assert answers[0] == answers[1]
    assert answers[0].startswith(b"HTTP/1.1 503")


async def test_a_request_that_stops_counts_until_its_client_leaves() -> None:
    async with opened(short=True) as way:
        way.feed(PLAIN_IDS[:-4])
        draining = asyncio.ensure_future(way.runner.app[DRAIN].run(60.0))
        await asyncio.sleep(0.05)
        assert not draining.done()
        way.protocol.connection_lost(None)
        way.wire.closed = True
        await asyncio.wait_for(draining, 10)


@pytest.mark.parametrize("short", [True, False])
async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(short: bool) -> None:
    async with opened(short=short, service_s=None, keepalive_timeout_s=0.05) as way:
        way.feed(PLAIN_IDS)
        await asyncio.sleep(0.15)
        assert not way.wire.closed
        way.engine.finish()
        await until(lambda: way.wire.written != b"")
        assert not way.wire.closed
        await until(lambda: way.wire.closed)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("hold_s", [60.0, 0.15])
@pytest.mark.parametrize("cut", [20, -4], ids=["in the head", "in the body"])
async def test_a_connection_on_which_a_request_arrives_is_not_idle(
    short: bool, hold_s: float, cut: int
) -> None:
    """Also if it had been for nearly as long as one may be; afterwards it may be idle for as long again."""
    async with opened(short=short, keepalive_timeout_s=0.05, hold_s=hold_s) as way:
        way.feed(PLAIN_IDS[:cut])
        await asyncio.sleep(0.1)
        assert not way.wire.closed
        await until(lambda: hold_s > 1 or not way.express)
        way.feed(PLAIN_IDS[cut:])
        await until(lambda: way.wire.written.startswith(b"HTTP/1.1 200"))
        await until(lambda: way.wire.closed)
