"""A server whose every answer and delay is known, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

DIMENSIONS = 16
MSGPACK = "application/msgpack"


@dataclass(frozen=True)
class Script:
    """What it does. stall_at: the request (counted from 1) at which the whole server stops for stall_s.

    refuse_every, fail_every, drop_every: every n-th request gets 429, 500 or a closed connection; 0: none.
    hang_every: every n-th is never answered. wrong_after: the last request that gets the right vectors.
    info, models: what /info says, and the names that /v1/models lists; None: there is no such page.
    """

    delay_s: float = 0.0
    stall_at: int = 0
    stall_s: float = 0.0
    refuse_every: int = 0
    fail_every: int = 0
    drop_every: int = 0
    hang_every: int = 0
    wrong_after: int | None = None
    info: dict[str, Any] | None = None
    models: tuple[str, ...] | None = None


class Stub:
    """Use as a context manager; `url` is known inside. requests: how many POSTs so far."""

    def __init__(self, script: Script = Script()) -> None:
        self._script = script
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.requests = 0
        self.url = ""

    def __enter__(self) -> Stub:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/embeddings", self._embed)
        if self._script.info is not None:
            app.router.add_get("/info", self._info)
        if self._script.models is not None:
            app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response(self._script.info)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self._script.models or ()]})

    async def _embed(self, request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read())
        self.requests += 1
        number, script = self.requests, self._script
        if number == script.stall_at:
            time.sleep(script.stall_s)  # noqa: ASYNC251 - that nothing else runs is the point
        if script.hang_every and number % script.hang_every == 0:
            await asyncio.sleep(60)
        refusal = await self._refusal(number, request)
        if refusal is not None:
            return refusal
        if script.delay_s:
            await asyncio.sleep(script.delay_s)
        wrong = script.wrong_after is not None and number > script.wrong_after
        return web.Response(body=answer(body, wrong), content_type=MSGPACK, headers=self._headers())

    def _headers(self) -> dict[str, str]:
        return {"x-queue-time": "0.250", "x-inference-time": f"{self._script.delay_s * 1e3:.3f}"}

    async def _refusal(self, number: int, request: web.Request) -> web.Response | None:
        script = self._script
        if script.refuse_every and number % script.refuse_every == 0:
            return web.Response(status=429, body=b"{}", headers={"retry-after-ms": "5", "retry-after": "1"})
        if script.fail_every and number % script.fail_every == 0:
            return web.Response(status=500, body=b"{}")
        if script.drop_every and number % script.drop_every == 0 and request.transport is not None:
            request.transport.abort()
        return None


def answer(body: dict[str, Any], wrong: bool = False) -> bytes:
    """The msgpack block of vectors that depend on the inputs alone."""
    inputs = sequences(body)
    vectors = np.stack([vector(item, wrong) for item in inputs])
    tokens = sum(len(item) if isinstance(item, np.ndarray) else len(item.split()) + 2 for item in inputs)
    return msgspec.msgpack.encode(
        {
            "dtype": "float32",
            "shape": list(vectors.shape),
            "embeddings": vectors.tobytes(),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def sequences(body: dict[str, Any]) -> list[Any]:
    """The ids i32[n] or the text of each sequence."""
    if "input" in body:
        return list(body["input"])
    ids, lengths = (np.frombuffer(body[key], "<i4") for key in ("input_ids", "lengths"))
    return np.split(ids, np.cumsum(lengths)[:-1])


def vector(item: Any, wrong: bool = False) -> np.ndarray[Any, np.dtype[np.float32]]:
    """f32[16], another one for every input."""
    seed = int(np.sum(item)) if isinstance(item, np.ndarray) else sum(item.encode())
    return np.random.default_rng([seed, int(wrong)]).standard_normal(DIMENSIONS).astype("<f4")
