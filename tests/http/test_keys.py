"""API keys: which routes want one, and what counts as one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.options import GatewayOptions
from gateway.routes.dashboard import EVENTS_PATH
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.web.files import names
from tests.http.served import Served, serving

# A request that each work route serves, and the status that it owes.
WORK: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/embeddings": ({"input": [1]}, 200),
    "/embeddings": ({"input": [1]}, 200),
    "/v1/contextualizedembeddings": ({"input": [["a"]]}, 200),
    "/embed": ({"inputs": [1]}, 200),
    "/": ({"inputs": [1]}, 200),
    "/similarity": ({"inputs": {"source_sentence": "a", "sentences": ["b"]}}, 200),
    "/embed_all": ({"inputs": "a"}, 422),
    "/embed_sparse": ({"inputs": "a"}, 422),
    "/predict": ({"inputs": "a"}, 422),
    "/tokenize": ({"inputs": "a"}, 200),
    "/decode": ({"ids": [1]}, 200),
    "/rerank": ({"query": "a", "texts": ["b"]}, 200),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, 200),
    "/v2/rerank": ({"query": "a", "documents": ["b"]}, 200),
    "/score": ({"text_1": "a", "text_2": "b"}, 200),
    "/v1/score": ({"text_1": "a", "text_2": "b"}, 200),
    "/v1/embed": ({"texts": ["a"]}, 200),
    "/v2/embed": ({"texts": ["a"]}, 200),
    "/v1/sequences": ({"input_ids": b"\1\0\0\0"}, 200),
}
KEYED = [*(("POST", path) for path in WORK), ("GET", "/v1/models"), ("GET", "/info")]
OPEN = [("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"), ("HEAD", "/health")]
OPEN += [
    ("GET", path) for path in ("/openapi.json", "/docs", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js")
]
OPEN += [("GET", "/"), *(("GET", f"/dashboard/{name}") for name in names())]
# It never ends; tests/http/test_dashboard.py asks it for a key.
ENDLESS = ("GET", EVENTS_PATH)


@pytest.fixture
async def locked(tokenizer: HuggingFaceTokenizer) -> AsyncIterator[Served]:
    async with serving(GatewayOptions(api_keys=("first key", "sécond")), tokenizer=tokenizer) as server:
        yield server


async def status(server: Served, method: str, path: str, authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    body = {"json": WORK[path][0]} if method == "POST" else {}
    return (await server.send(method, path, headers=headers, **body)).status


def owed(path: str) -> int:
    return WORK[path][1] if path in WORK else 200


@pytest.mark.parametrize(("method", "path"), KEYED)
async def test_work_routes_want_a_key(locked: Served, method: str, path: str) -> None:
    for authorization in (None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic first key", "first key"):
        assert await status(locked, method, path, authorization) == 401, authorization
    for authorization in ("Bearer first key", "bearer first key", "Bearer sécond", "Bearer  first key "):
        assert await status(locked, method, path, authorization) == owed(path), authorization
    assert not locked.engine.batches or method == "POST"


async def test_every_work_route_is_in_the_table_above(locked: Served) -> None:
    """A route added without a key in front of it fails here."""
    routes = {
        (route.method, route.resource.canonical) for route in locked.app.router.routes() if route.resource
    }
    heads = {("HEAD", path) for method, path in (*KEYED, *OPEN) if method == "GET"}
    expected = {*KEYED, *OPEN, *heads, ENDLESS}
    assert {route for route in routes if route[0] not in ("*", "OPTIONS")} == expected


@pytest.mark.parametrize(("method", "path"), OPEN)
async def test_probes_are_open(locked: Served, method: str, path: str) -> None:
    for authorization in (None, "Bearer wrong"):
        assert await status(locked, method, path, authorization) == 200


@pytest.mark.parametrize("path", [path for _, path in KEYED])
async def test_options_are_open(locked: Served, path: str) -> None:
    assert await status(locked, "OPTIONS", path, None) == 204


async def test_the_refusal_tells_what_to_send_and_reads_no_body(locked: Served) -> None:
    reply = await locked.send("POST", "/v1/embeddings", data=b"not json", headers={"Content-Type": "text/x"})
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert "Authorization: Bearer" in reply.error["message"]


async def test_keys_show_nowhere(locked: Served) -> None:
    reply = await locked.send("GET", "/info", headers={"Authorization": "Bearer first key"})
    assert b"first key" not in reply.body
    assert "first key" not in repr(GatewayOptions(api_keys=("first key",)))


async def test_without_keys_everything_is_open(server: Served) -> None:
    for method, path in (*KEYED, *OPEN):
        assert await status(server, method, path, None) == owed(path)
        assert await status(server, method, path, "Bearer anything") == owed(path)
