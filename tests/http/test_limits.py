"""How much, how long and how packed: requests under way, deadlines, slow bodies, compressions."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from backports import zstd

from gateway.options import GatewayOptions
from rose.batch import Int32
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine
from tests.http.served import PATHS, Served, byte_tokenizer, expected, serving, until

BODY = json.dumps({"input": [1, 2]}).encode()


async def test_more_requests_than_may_be_under_way_are_429_at_once() -> None:
    engine = FakeEngine(service_s=None)
    async with serving(GatewayOptions(max_outstanding_requests=5), engine=engine) as server:
        requests = [asyncio.ensure_future(server.embed({"input": [[1]] * 5})) for _ in range(25)]
        await until(lambda: sum(request.done() for request in requests) == 20)
        refused = [await request for request in requests if request.done()]
        for reply in refused:
            assert (reply.status, reply.error["code"]) == (429, "overloaded")
            assert int(reply.headers["Retry-After"]) >= 1
        assert (await server.send("GET", "/health")).status == 200
        while not all(request.done() for request in requests):
            if engine.running:
                engine.finish()
            await asyncio.sleep(0)
        assert [(await request).status for request in requests].count(200) == 5
        engine._service_s = 0.0
        await server.assert_works()


async def test_where_nothing_waits_a_refused_client_is_told_to_come_back_in_a_second() -> None:
    engine = FakeEngine(service_s=0.02)
    async with serving(GatewayOptions(max_outstanding_requests=1), engine=engine) as server:
        for measured in (False, True):
            engine._service_s = None
            running = asyncio.ensure_future(server.embed({"input": [1]}))
            await until(lambda: len(engine.running) == 1)
            reply = await server.embed({"input": [2]})
            assert (reply.status, (server.batcher.metrics.tokens_per_s > 0)) == (429, measured)
            assert (reply.headers["Retry-After"], reply.headers["retry-after-ms"]) == ("1", "1000")
            assert "retry in 1 s" in reply.error["message"]
            engine.finish()
            await running


async def test_retry_after_is_what_waits_by_the_measured_rate() -> None:
    engine = FakeEngine(service_s=0.02)
    scheduling = SchedulerOptions(max_in_flight=1)
    async with serving(
        GatewayOptions(max_outstanding_requests=2), engine=engine, scheduling=scheduling
    ) as server:
        for _ in range(3):
            await server.embed({"input": [[1] * 100]})
        engine._service_s = None
        running = asyncio.ensure_future(server.embed({"input": [[1] * 100]}))
        await until(lambda: len(engine.running) == 1)
        waiting = asyncio.ensure_future(server.embed({"input": [[1] * 500] * 20}))
        await until(lambda: server.batcher.metrics.waiting_tokens == 10_000)
        rate = server.batcher.metrics.tokens_per_s
        assert rate > 0
        reply = await server.embed({"input": [1]})
        assert reply.status == 429
        assert abs(int(reply.headers["retry-after-ms"]) - 10_000 / rate * 1e3) <= 1
        for request in (running, waiting):
            request.cancel()


@pytest.mark.parametrize("path", [PATHS[0], "/embed"])
async def test_a_request_can_ask_for_less_time(path: str) -> None:
    engine = FakeEngine(service_s=None)
    async with serving(engine=engine, scheduling=SchedulerOptions(max_in_flight=1)) as server:
        running = asyncio.ensure_future(server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        body = {"input": [2], "inputs": [2]}
        reply = await server.embed(body, path=path, headers={"x-request-timeout-ms": "30"})
        assert reply.status == 504
        told = reply.body.decode()
        assert "the 30 ms that the request had to be started in (x-request-timeout-ms)" in told
        assert "were over while it waited for a batch" in told
        engine.finish()
        assert (await running).status == 200
        assert len(engine.batches) == 1  # what had expired was never launched


async def test_a_request_cannot_ask_for_more_time_than_the_server_gives() -> None:
    engine = FakeEngine(service_s=None)
    options = GatewayOptions(request_timeout_s=0.03)
    async with serving(options, engine=engine, scheduling=SchedulerOptions(max_in_flight=1)) as server:
        running = asyncio.ensure_future(server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        async with asyncio.timeout(10):
            reply = await server.embed({"input": [2]}, headers={"x-request-timeout-ms": "100000"})
        assert reply.status == 504
        assert (
            "the 30 ms that the request had to be started in (--request-timeout-s)" in reply.error["message"]
        )
        engine.finish()
        await running


async def test_time_that_was_over_before_there_were_tokens_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer()
    encode = tokenizer.encode

    def slowly(texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        time.sleep(0.05)
        return encode(texts, max_tokens)

    monkeypatch.setattr(tokenizer, "encode", slowly)
    async with serving(tokenizer=tokenizer) as server:
        beside_the_loop = {"input": "a" * 300}
        reply = await server.embed(beside_the_loop, headers={"x-request-timeout-ms": "20"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_expired")
        assert "were over before its tokens were there" in reply.error["message"]
        assert not server.engine.batches


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e400", "1,5", "30 ms", ""])
async def test_odd_timeouts_are_400(server: Served, value: str) -> None:
    reply = await server.embed({"input": [1]}, headers={"x-request-timeout-ms": value})
    assert (reply.status, reply.error["param"]) == (400, "x-request-timeout-ms")


async def test_a_body_that_does_not_come_is_408_and_the_connection_closes() -> None:
    async with serving(GatewayOptions(body_timeout_s=0.05)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:5])
        async with asyncio.timeout(10):
            answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nConnection: close\r\n" in answer
        assert b'"code":"body_timeout"' in answer
        writer.close()
        await server.assert_works()


COMPRESS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
    "identity": bytes,
    "GZIP": gzip.compress,
    "x-gzip": gzip.compress,
}


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_compressed_bodies(server: Served, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    for body in (BODY, BODY[:-1] + b" " * 100_000 + b"}"):
        reply = await server.send("POST", PATHS[0], data=COMPRESS[encoding](body), headers=headers)
        assert reply.status == 200, reply.body
        np.testing.assert_allclose(reply.vectors, [expected([1, 2])], rtol=1e-6)


@pytest.mark.parametrize("encoding", ["compress", "snappy", "gzip, gzip", "aes128gcm", "", "br"])
async def test_unknown_compressions_are_415_and_name_the_known(server: Served, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    reply = await server.send("POST", PATHS[0], data=BODY, headers=headers)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert "Please install" not in reply.error["message"]
    assert {"gzip", "deflate", "zstd"} <= set(reply.headers["Accept-Encoding"].split(", "))
    await server.assert_works()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_broken_compression_is_400_in_one_line(server: Served, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    reply = await server.send("POST", PATHS[0], data=b"\xff\xffno such thing", headers=headers)
    assert (reply.status, reply.error["code"]) == (400, "invalid_body")
    assert reply.error["message"] == f"the body cannot be read as {encoding}: it is damaged"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_compressed_body_that_was_cut_short_is_400(server: Served, encoding: str) -> None:
    """Wherever it was; also where all that is missing is the sum at its end."""
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    whole = COMPRESS[encoding](BODY)
    for length in range(1, len(whole)):
        reply = await server.send("POST", PATHS[0], data=whole[:length], headers=headers)
        assert (reply.status, reply.error["code"]) == (400, "invalid_body")
        assert reply.error["message"] == f"the body cannot be read as {encoding}: it ends before its end"
    await server.assert_works()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_bomb_is_413_and_takes_no_memory(encoding: str) -> None:
    """100 MB of blanks in a body of some 100 kB, or less."""
    bomb = COMPRESS[encoding](b" " * 100_000_000)
    assert len(bomb) < 1_000_000
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with serving(GatewayOptions(max_body_bytes=1_000_000)) as server:
        tracemalloc.start()
        try:
            reply = await server.send("POST", PATHS[0], data=bomb, headers=headers)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert peak_bytes < 30e6
        await server.assert_works()
