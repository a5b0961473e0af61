"""Pages of other origins: let in by name, never past the key."""

from __future__ import annotations

import pytest

from gateway.options import GatewayOptions
from tests.http.served import PATHS, Served, serving

PAGE = "https://app.example"


def allowed(headers: object) -> str | None:
    return headers.get("Access-Control-Allow-Origin")  # type: ignore[attr-defined, no-any-return]


async def test_a_preflight_names_what_the_request_may_hold() -> None:
    async with serving(GatewayOptions(cors_origins=(PAGE,), api_keys=("k",))) as server:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        reply = await server.send("OPTIONS", PATHS[0], headers={"Origin": PAGE, **asks})
        assert reply.status == 204
        assert allowed(reply.headers) == PAGE
        assert "POST" in reply.headers["Access-Control-Allow-Methods"]
        assert {"Authorization", "traceparent"} <= set(
            reply.headers["Access-Control-Allow-Headers"].split(", ")
        )
        assert reply.headers["Vary"] == "Origin"


async def test_answers_and_errors_are_readable_for_the_page_and_keys_still_asked_for() -> None:
    async with serving(GatewayOptions(cors_origins=(PAGE,), api_keys=("k",))) as server:
        for key, status in (("k", 200), ("x", 401)):
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            reply = await server.embed({"input": [1]}, headers=headers)
            assert (reply.status, allowed(reply.headers)) == (status, PAGE)
            assert "x-request-id" in reply.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize(
    ("origins", "origin", "answer"),
    [
        ((PAGE,), "https://evil.example", None),
        ((PAGE,), None, None),
        ((), PAGE, None),
        (("*",), PAGE, "*"),
        ((PAGE, "http://localhost:3000"), "http://localhost:3000", "http://localhost:3000"),
    ],
)
async def test_only_named_origins_are_let_in(
    origins: tuple[str, ...], origin: str | None, answer: str | None
) -> None:
    async with serving(GatewayOptions(cors_origins=origins)) as server:
        headers = {} if origin is None else {"Origin": origin}
        for path in ("/v1/models", "/nowhere"):
            reply = await server.send("GET", path, headers=headers)
            assert allowed(reply.headers) == answer
            assert ("Vary" in reply.headers) == (origins not in ((), ("*",)))


async def test_without_origins_nothing_is_added(server: Served) -> None:
    reply = await server.send("OPTIONS", PATHS[0], headers={"Origin": PAGE})
    assert not [name for name in reply.headers if name.startswith("Access-Control")]
