"""A port that answers while the model loads, and then belongs to the application."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gateway.error_bodies import ERROR_STRUCTS
from gateway.openapi import WORK
from gateway.startup import Port, listen_at, listen_on, tls_context


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


async def test_while_loading_each_route_refuses_in_its_own_words() -> None:
    port = Port(listen_on("127.0.0.1", 0))
    await port.open()
    headers = {"x-request-id": "mine"}
    try:
        async with aiohttp.ClientSession(headers=headers) as session, asyncio.timeout(20):
            for path, shape in [(path, work.shape) for work in WORK for path in work.paths]:
                async with session.post(f"{port.url}{path}", json={}) as response:
                    assert (response.status, response.headers["x-request-id"]) == (503, "mine")
                    msgspec.json.decode(await response.read(), type=ERROR_STRUCTS[shape])
            async with session.get(f"{port.url}/health") as response:
                assert (response.status, response.headers["x-request-id"]) == (200, "mine")
            async with session.post(f"{port.url}/embed", json={}, headers={"Expect": "x"}) as response:
                assert (response.status, response.content_type) == (417, "application/json")
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


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed PEM for localhost, key and certificate in one file."""
    file = tmp_path / "server.pem"
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext"),
            *("subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    file.write_bytes(key.read_bytes() + certificate.read_bytes())
    return file


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_https(certificate: Path) -> None:
    port = Port(listen_on("127.0.0.1", 0), tls_context(certificate, None))
    assert port.url.startswith("https://127.0.0.1:")
    await port.open()
    try:
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session,
            session.get(f"{port.url}/health") as answer,
        ):
            assert answer.status == 200
        async with aiohttp.ClientSession() as distrusting:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await get(f"{port.url}/health", distrusting)
    finally:
        await port.close()


def test_a_bad_certificate_is_found_at_once(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for path in (bad, tmp_path / "missing.pem"):
        with pytest.raises(OSError):
            tls_context(path, None)


async def test_a_unix_socket_is_served_and_cleared_away(tmp_path: Path) -> None:
    path = tmp_path / "bouquet.sock"
    for _ in range(2):  # the second replaces what the first left behind
        port = Port(listen_at(str(path)))
        assert port.path == str(path)
        await port.open()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            assert await get(f"{port.url}/health", session) == (200, '{"status":"ok"}')
            with pytest.raises(OSError, match="in use"):
                listen_at(str(path))
        await port.close()
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))


def test_a_file_at_the_socket_s_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(OSError):
        listen_at(str(path))
    assert path.read_text() == "precious"
    for taken in (path, tmp_path):
        with pytest.raises(OSError, match="something else than a socket"):
            listen_at(str(taken))


async def test_many_connections_are_accepted_within_a_few_turns() -> None:
    listening = listen_on("127.0.0.1", 0)
    port = Port(listening)
    await port.open()
    clients = [socket.create_connection(listening.getsockname(), timeout=10) for _ in range(64)]
    try:
        for _ in range(12):  # one connection a turn would take 64
            await asyncio.sleep(0)
        assert port._loading is not None and port._loading.server is not None
        assert len(port._loading.server.connections) == len(clients)
    finally:
        for client in clients:
            client.close()
        await port.close()
