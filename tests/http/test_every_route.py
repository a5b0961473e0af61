"""What holds on every work route alike: one rule for what is too long, both codecs, one set of headers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.openapi import WORK
from tests.http.served import Served, text_ids
from tests.http.test_keys import WORK as REQUESTS

LONG = "a" * 600
# Each route that takes text, asked not to cut.
REFUSING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": LONG},
    "/embeddings": {"input": ["b", LONG], "truncate": False},
    "/embed": {"inputs": LONG},
    "/": {"inputs": [LONG]},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": [LONG]}},
    "/rerank": {"query": "a", "texts": [LONG]},
    "/v1/rerank": {"query": "a", "documents": [LONG], "truncation": False},
    "/v2/rerank": {"query": "a", "documents": [LONG], "truncate": False},
    "/score": {"text_1": "a", "text_2": LONG},
    "/v1/score": {"text_1": LONG, "text_2": "a"},
    "/v1/embed": {"texts": [LONG], "truncate": "NONE"},
    "/v2/embed": {"texts": [LONG], "truncate": "NONE"},
}
HEADERS = {"x-request-id", "x-total-time", "x-queue-time", "x-tokenization-time", "x-inference-time"}


@pytest.mark.parametrize("path", REFUSING)
async def test_what_is_too_long_is_told_with_both_numbers(server: Served, path: str) -> None:
    reply = await server.embed(REFUSING[path], path=path)
    assert reply.status in (400, 422)
    words = f"has {len(text_ids(LONG))} tokens; this model takes at most 512"
    assert words in reply.body.decode()
    assert not server.engine.batches


@pytest.mark.parametrize("path", REFUSING)
async def test_the_limit_itself_is_within_it(server: Served, path: str) -> None:
    """One token fewer, as many, one more: none of them hangs."""
    for length, served in ((509, True), (510, True), (511, False)):
        body = msgspec.json.encode(REFUSING[path]).replace(LONG.encode(), b"a" * length)
        async with asyncio.timeout(5):
            reply = await server.send("POST", path, data=body, headers={"Content-Type": "application/json"})
        assert (reply.status == 200) is served
        if not served:
            assert b"has 513 tokens; this model takes at most 512" in reply.body


@pytest.mark.parametrize("path", [path for work in WORK for path in work.paths])
@pytest.mark.parametrize("codec", ["application/json", "application/msgpack"])
async def test_both_codecs_in_and_out(server: Served, path: str, codec: str) -> None:
    body, status = REQUESTS[path]
    for encode, sent in ((msgspec.json.encode, "json"), (msgspec.msgpack.encode, "msgpack")):
        headers = {"Content-Type": f"application/{sent}", "Accept": codec}
        reply = await server.send("POST", path, data=encode(body), headers=headers)
        assert (reply.status, reply.headers["Content-Type"]) == (status, codec)
        assert reply.value


@pytest.mark.parametrize("path", [path for path in REFUSING if path != "/"])
async def test_figures_are_told(server: Served, path: str) -> None:
    reply = await server.embed(REQUESTS[path][0], path=path)
    assert {name.lower() for name in reply.headers} >= HEADERS
    assert int(reply.headers["x-compute-tokens"]) >= 1
