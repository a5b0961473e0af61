"""A port that answers while the model loads, and then belongs to the application."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from aiohttp import web

from gateway.startup import Port, listen_on


async def get(url: str, session: aiohttp.ClientSession) -> tuple[int, str]:
    async with session.get(url, timeout=aiohttp.ClientTimeout(10)) as response:
        return response.status, await response.text()


async def test_loading_then_the_application_on_the_same_connection_pool() -> None:
    port = Port(listen_on("127.0.0.1", 0))
    app = web.Application()

    async def greet(_: web.Request) -> web.Response:
        return web.Response(text="application")

    app.router.add_get("/{path:.*}", greet)
    await port.open()
    try:
        async with aiohttp.ClientSession() as session:
            assert await get(f"{port.url}/health", session) == (200, '{"status":"ok"}')
            status, body = await get(f"{port.url}/ready", session)
            assert status == 503
            assert '"code":"unavailable"' in body
            async with session.post(f"{port.url}/v1/embeddings", json={"input": "x"}) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
            await port.serve(app)
            assert await get(f"{port.url}/ready", session) == (200, "application")
            port.stop_accepting()
            assert await get(f"{port.url}/ready", session) == (200, "application")
        async with aiohttp.ClientSession() as late:
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(f"{port.url}/ready", late)
    finally:
        await port.close()


def test_a_port_in_use_is_found_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen_on("127.0.0.1", taken.getsockname()[1])


def test_every_address_is_shown_as_one_that_a_client_can_use() -> None:
    for host, shown in (
        ("0.0.0.0", "http://127.0.0.1:"),
        ("localhost", "http://"),
        ("127.0.0.1", "http://127."),
    ):
        with listen_on(host, 0) as listening:
            assert Port(listening).url.startswith(shown)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6_addresses_are_bracketed() -> None:
    with listen_on("::", 0) as listening:
        assert Port(listening).url.startswith("http://[::1]:")
