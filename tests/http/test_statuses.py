"""One table: on every route a refusal has the same status, in the body of the route's dialect, with an id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.error_bodies import ERROR_STRUCTS
from gateway.openapi import WORK as DESCRIBED
from gateway.options import GatewayOptions
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.errors import OutOfMemoryError, StepError
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine
from tests.http.served import Reply, Served, serving, until
from tests.http.test_keys import WORK as REQUESTS

SHAPES = {path: work.shape for work in DESCRIBED for path in work.paths}
# Those whose good request reaches the engine.
COMPUTING = [path for path, (_, status) in REQUESTS.items() if status == 200]
COMPUTING = [path for path in COMPUTING if path not in ("/tokenize", "/decode")]


def check(reply: Reply, path: str, status: int) -> None:
    """The refusal is `status`, and its body that of the path's dialect, whole."""
    assert (reply.status, reply.headers["Content-Type"]) == (status, "application/json")
    struct = ERROR_STRUCTS[SHAPES[path]]
    msgspec.json.decode(reply.body, type=struct)
    assert set(reply.value) == set(struct.__struct_fields__)
    assert reply.headers["x-request-id"] == "mine"


async def ask(server: Served, path: str, **headers: str) -> Reply:
    return await server.embed(REQUESTS[path][0], path=path, headers={"x-request-id": "mine", **headers})


@asynccontextmanager
async def busy(tokenizer: HuggingFaceTokenizer, options: GatewayOptions) -> AsyncIterator[Served]:
    """A server whose engine is at work on one request and will not end."""
    engine = FakeEngine(service_s=None)
    scheduling = SchedulerOptions(max_in_flight=1)
    async with (
        asyncio.timeout(20),
        serving(options, engine=engine, scheduling=scheduling, tokenizer=tokenizer) as server,
    ):
        running = asyncio.ensure_future(server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        yield server
        running.cancel()


def test_every_described_route_is_tried() -> None:
    assert set(SHAPES) == set(REQUESTS)


@pytest.mark.parametrize("path", SHAPES)
async def test_401(tokenizer: HuggingFaceTokenizer, path: str) -> None:
    async with serving(GatewayOptions(api_keys=("k",)), tokenizer=tokenizer) as server:
        check(await ask(server, path), path, 401)
        check(await ask(server, path, Authorization="Bearer other"), path, 401)


@pytest.mark.parametrize("path", [path for path in SHAPES if path not in ("/",)])
async def test_404(server: Served, path: str) -> None:
    """A path that nearly is one is told in the default dialect, whatever it resembles."""
    reply = await server.send("POST", path + "/", json={})
    assert (reply.status, reply.error["code"]) == (404, "not_found")


NAMING = [path for path in SHAPES if "/v" in path and path != "/v1/sequences"]


@pytest.mark.parametrize("path", NAMING)
async def test_404_of_a_model(server: Served, path: str) -> None:
    body = REQUESTS[path][0] | {"model": "another"}
    reply = await server.embed(body, path=path, headers={"x-request-id": "mine"})
    check(reply, path, 404)


@pytest.mark.parametrize("path", SHAPES)
async def test_405(server: Served, path: str) -> None:
    reply = await server.send("PUT", path, headers={"x-request-id": "mine"})
    check(reply, path, 405)
    assert reply.headers["Allow"] == ("POST, GET, HEAD, OPTIONS" if path == "/" else "POST, OPTIONS")


@pytest.mark.parametrize("path", SHAPES)
async def test_413(tokenizer: HuggingFaceTokenizer, path: str) -> None:
    async with serving(GatewayOptions(max_body_bytes=100), tokenizer=tokenizer) as server:
        body = msgspec.json.encode(REQUESTS[path][0] | {"user": "x" * 200})
        headers = {"Content-Type": "application/json", "x-request-id": "mine"}
        check(await server.send("POST", path, data=body, headers=headers), path, 413)


@pytest.mark.parametrize("path", SHAPES)
async def test_429(tokenizer: HuggingFaceTokenizer, path: str) -> None:
    async with busy(tokenizer, GatewayOptions(max_outstanding_requests=1)) as server:
        reply = await ask(server, path)
        check(reply, path, 429)
        assert int(reply.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("path", COMPUTING)
async def test_503_while_draining(server: Served, path: str) -> None:
    await server.batcher.close(0.0)
    reply = await ask(server, path)
    check(reply, path, 503)
    assert reply.headers["Connection"] == "close"


@pytest.mark.parametrize("path", COMPUTING)
async def test_504(tokenizer: HuggingFaceTokenizer, path: str) -> None:
    async with busy(tokenizer, GatewayOptions()) as server:
        check(await ask(server, path, **{"x-request-timeout-ms": "20"}), path, 504)
        assert len(server.engine.batches) == 1


@pytest.mark.parametrize("path", COMPUTING)
@pytest.mark.parametrize(
    ("failure", "status"), [(lambda: StepError("broke"), 500), (lambda: OutOfMemoryError("none left"), 503)]
)
async def test_500_and_503_of_a_step(
    server: Served, path: str, failure: Callable[[], Exception], status: int
) -> None:
    error: Any = failure()
    for _ in range(3):  # a batch that memory is too small for runs in halves
        server.engine.fail_next(error)
    check(await ask(server, path), path, status)
