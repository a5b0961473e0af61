"""The real gateway and scheduler on loopback, before the fake engine; and what its answers should be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from gateway.app import create_app
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.tokenization import base
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Float32
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info, fake_vector

PATHS = ("/v1/embeddings", "/embeddings")
BOS, EOS = 256, 257


def byte_backend() -> Tokenizer:
    """An id a byte between <s> = 256 and </s> = 257, from the real library; its own limits are wrong."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)} | {"<s>": BOS, "</s>": EOS}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    return backend


def byte_tokenizer() -> HuggingFaceTokenizer:
    """`byte_backend` as the gateway has it."""
    return HuggingFaceTokenizer(byte_backend())


def text_ids(text: str) -> list[int]:
    """What `byte_tokenizer` makes of `text`, worked out without it."""
    return [BOS, *(_byte_ids()[byte] for byte in text.encode()), EOS]


@cache
def _byte_ids() -> list[int]:
    """The place of each byte's printable stand-in among all of them, sorted.

    Source: openai/gpt-2, encoder.py, bytes_to_unicode.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in plain]
    stand_ins = [value if value in plain else 256 + others.index(value) for value in range(256)]
    return [sorted(stand_ins).index(value) for value in stand_ins]


def expected(ids: Sequence[int], dimensions: int = 8, normalize: bool = True, width: int = 8) -> Float32:
    """f32[dimensions] that the server owes for `ids`: cut first, scaled after."""
    vector = fake_vector(list(ids), width)[:dimensions]
    return vector / np.linalg.norm(vector) if normalize else vector


@dataclass(frozen=True)
class Reply:
    """An answer, read."""

    status: int
    headers: Any
    body: bytes

    @property
    def value(self) -> Any:
        """The body, decoded by its own Content-Type."""
        decoders = {"application/json": msgspec.json.decode, "application/msgpack": msgspec.msgpack.decode}
        return decoders[self.headers["Content-Type"]](self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The inner error object, after a look at the shape that OpenAI's clients want."""
        assert set(self.value) == {"error"}
        assert set(self.value["error"]) == {"message", "type", "param", "code"}
        return self.value["error"]

    @property
    def vectors(self) -> Float32:
        """f32[n, dim] of a JSON answer with floats."""
        return np.array([item["embedding"] for item in self.value["data"]], np.float32)


class Served:
    """A running server. url: http://host:port."""

    def __init__(self, runner: web.AppRunner, engine: FakeEngine, batcher: Batcher) -> None:
        self.app, self.engine, self.batcher = runner.app, engine, batcher
        self.port = runner.addresses[0][1]
        self._runner = runner
        self.url = f"http://127.0.0.1:{self.port}"
        self.session = aiohttp.ClientSession(
            self.url,
            connector=aiohttp.TCPConnector(limit=0),
            json_serialize=lambda value: msgspec.json.encode(value).decode(),  # bytes become base64
        )

    async def send(self, method: str, path: str, **options: Any) -> Reply:
        """One request, as aiohttp's client sends it."""
        async with self.session.request(method, path, **options) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def embed(self, body: Any, path: str = PATHS[0], **options: Any) -> Reply:
        """POST `body` as JSON."""
        return await self.send("POST", path, json=body, **options)

    async def pack(self, body: Any, **headers: str) -> Reply:
        """POST `body` as msgpack."""
        all_headers = {"Content-Type": "application/msgpack", **headers}
        return await self.send("POST", PATHS[0], data=msgspec.msgpack.encode(body), headers=all_headers)

    @property
    def connections(self) -> int:
        """Open ones, as the server sees it."""
        return len(self._runner.server.connections)

    @property
    def transports(self) -> list[asyncio.BaseTransport]:
        """Of the open connections."""
        transports = (connection.transport for connection in self._runner.server.connections)
        return [transport for transport in transports if transport is not None]

    async def assert_works(self) -> None:
        """The next good request is served."""
        reply = await self.embed({"input": [5, 6, 7]})
        assert reply.status == 200, reply.body
        np.testing.assert_allclose(reply.vectors, [expected([5, 6, 7])], rtol=1e-6)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; for what announces itself nowhere. At most 10 s."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    options: GatewayOptions | None = None,
    *,
    engine: FakeEngine | None = None,
    scheduling: SchedulerOptions | None = None,
    tokenizer: base.Tokenizer | None = None,
    **parts: Any,
) -> AsyncIterator[Served]:
    """The server with these parts (default: no tokenizer), until the block ends; parts: of `create_app`."""
    engine = engine or FakeEngine(info=fake_info())
    batcher = Batcher(engine, scheduling or SchedulerOptions())
    await batcher.start()
    app = create_app(
        options or GatewayOptions(), batcher, engine.info, tokenizer, engine_stats=engine.stats, **parts
    )
    runner = await listen(app, "127.0.0.1", 0)
    served = Served(runner, engine, batcher)
    try:
        yield served
    finally:
        await served.session.close()
        await batcher.close(0.0)
        await runner.cleanup()
