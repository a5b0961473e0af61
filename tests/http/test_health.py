"""Probes, /info, headers of every answer, and the access line."""

from __future__ import annotations

import asyncio
import logging
import re
import time

import pytest
import uvloop

from gateway.drain import DRAIN
from gateway.listener import ACCESS_LOG
from gateway.options import GatewayOptions
from rose.errors import EngineDeadError
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine
from tests.http.served import PATHS, Served, serving, until


async def statuses(server: Served) -> tuple[int, int]:
    return (await server.send("GET", "/health")).status, (await server.send("GET", "/ready")).status


async def test_a_running_server_is_alive_and_ready(server: Served) -> None:
    assert (await server.send("GET", "/health")).value == {"status": "ok"}
    assert (await server.send("GET", "/ready")).value == {"status": "ready"}


async def test_a_draining_server_is_alive_but_not_ready_and_takes_no_work(server: Served) -> None:
    await server.app[DRAIN].run(0.0)
    assert await statuses(server) == (200, 503)
    reply = await server.embed({"input": [1]})
    assert (reply.status, reply.headers["Connection"]) == (503, "close")
    assert "shutting down" in reply.error["message"]


async def test_a_dead_engine_is_neither(server: Served) -> None:
    server.engine.raise_next(EngineDeadError("gone"))
    await server.embed({"input": [1]})
    assert await statuses(server) == (503, 503)


async def test_an_engine_that_hangs_is_neither_once_its_time_is_over() -> None:
    engine = FakeEngine()
    engine.hang_next()
    async with (
        asyncio.timeout(10),
        serving(engine=engine, scheduling=SchedulerOptions(step_timeout_s=0.1)) as server,
    ):
        reply = await server.embed({"input": [1]})
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert await statuses(server) == (503, 503)


@pytest.mark.timed
async def test_health_answers_while_the_engine_is_busy() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    engine = FakeEngine(service_s=None)
    async with serving(engine=engine) as server:
        work = [asyncio.ensure_future(server.embed({"input": [number]})) for number in range(64)]
        await until(lambda: server.batcher.metrics.accepted == 64)
        started_s = time.perf_counter()
        for _ in range(20):
            assert await statuses(server) == (200, 200)
        assert time.perf_counter() - started_s < 2
        engine._service_s = 0.0
        engine.finish(len(engine.running))
        assert {(await reply).status for reply in work} == {200}


async def test_info_tells_model_limits_and_what_the_server_adds(server: Served) -> None:
    info = (await server.send("GET", "/info")).value
    assert info["model"]["dimensions"] == 8
    assert info["model"]["pooling"] == "mean"
    assert info["served_model_names"] == ["fake"]
    assert info["limits"] == {
        "max_tokens": 512,
        "max_items": 2048,
        "max_request_tokens": 1_048_576,
        "max_body_bytes": GatewayOptions().max_body_bytes,
        "max_outstanding_requests": 4096,
        "request_timeout_s": 300.0,
    }


async def test_a_request_id_is_echoed_if_it_can_be_a_header(server: Served) -> None:
    for given in ("mine-1", "x" * 128, "!~"):
        reply = await server.embed({"input": [1]}, headers={"x-request-id": given})
        assert reply.headers["x-request-id"] == given
    made = set()
    for given in ("", "two words", "x" * 129, "ä"):
        for body in ({"input": [1]}, {"input": []}):
            made.add((await server.embed(body, headers={"x-request-id": given})).headers["x-request-id"])
    assert len(made) == 8
    assert all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]+", name) for name in made)


async def test_times_are_told_in_milliseconds() -> None:
    engine = FakeEngine(service_s=0.05)
    async with serving(engine=engine) as server:
        headers = (await server.embed({"input": [1]})).headers
    parts = [float(headers[f"x-{part}-time"]) for part in ("queue", "tokenization", "inference")]
    assert 40 <= parts[2] < 5000
    assert parts[0] >= 0
    assert parts[1] >= 0
    assert sum(parts) <= float(headers["x-total-time"]) + 5


async def test_errors_have_an_id_and_a_time(server: Served) -> None:
    reply = await server.embed({"input": []})
    assert reply.headers["x-request-id"]
    assert float(reply.headers["x-total-time"]) >= 0


@pytest.mark.parametrize(("level", "lines"), [(logging.DEBUG, 1), (logging.INFO, 0)])
async def test_the_access_line_is_for_debugging(
    caplog: pytest.LogCaptureFixture, level: int, lines: int
) -> None:
    with caplog.at_level(level, ACCESS_LOG.name):
        async with serving() as server:
            await server.embed({"input": [1]}, headers={"x-request-id": "seen"})
    written = [record.getMessage() for record in caplog.records if record.name == ACCESS_LOG.name]
    assert len(written) == lines
    assert all(line.startswith(f"POST {PATHS[0]} 200 ") and "id=seen" in line for line in written)
