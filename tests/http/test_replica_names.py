"""A replica whose name has no address: it is shown with the reason, and taken once there is one."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.app import create_app
from gateway.options import GatewayOptions
from gateway.replicas import fleet as fleet_module
from gateway.replicas.endpoints import Listing
from gateway.replicas.fleet import Fleet
from gateway.replicas.options import ReplicaOptions
from gateway.replicas.replica import why_none_serves
from gateway.startup import Port, listen_on
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine
from tests.http.fleets import NO_WISH, fleet, settled
from tests.http.served import serving, until

NAME = "nowhere.invalid"
WHY = "its name has no address: Name or service not known"


@pytest.fixture
async def found(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of NAME, none at first."""
    addresses: list[str] = []
    loop = type(asyncio.get_running_loop())
    ask = loop.getaddrinfo

    async def getaddrinfo(self: Any, host: str, port: Any, **more: Any) -> Any:
        if host != NAME:
            return await ask(self, host, port, **more)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
    return addresses


async def test_it_is_named_beside_one_that_serves(found: list[str], caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    async with serving(engine=engine) as server, serving() as other:
        port = server.url.rpartition(":")[2]
        url = f"http://{NAME}:{port}"
        with caplog.at_level(logging.WARNING):
            async with fleet(other, urls=(url,)) as fleeting:
                await settled(fleeting, "ready", "connecting")
                nowhere = fleeting.fleet.describe()[1]
                assert (nowhere["name"], nowhere["reason"]) == (url, WHY)
                assert fleeting.balancer.replicas == fleeting.fleet.replicas
                assert f"replica {url}: {WHY}" in caplog.text
                await fleeting.work(4)
                found.append("127.0.0.1")
                await settled(fleeting, "ready", "ready")
                assert fleeting.fleet.describe()[1]["name"] == f"{url} at 127.0.0.1"
                await fleeting.work(20)
                assert engine.batches


async def test_pages_name_it_while_nothing_serves(found: list[str]) -> None:
    url = f"http://{NAME}:8000"
    async with serving() as other, fleet(other, urls=(url,)) as fleeting:
        gateway = create_app(
            GatewayOptions(), fleeting.balancer, fleeting.fleet.info, None, fleet=fleeting.fleet
        )
        await settled(fleeting, "ready", "connecting")
        fleeting.fleet._listing = Listing((url,), None)
        await settled(fleeting, "connecting")
        async with TestClient(TestServer(gateway)) as client:
            ready = await client.get("/ready")
            assert ready.status == 503
            assert f"{url}: {WHY}" in await ready.text()
            metrics = await (await client.get("/metrics")).text()
            assert f'ivy_replica_state{{replica="{url}",state="connecting"}} 1' in metrics


async def test_while_it_starts_the_port_tells_the_reason() -> None:
    port = Port(listen_on("127.0.0.1", 0))
    await port.open()
    try:
        async with aiohttp.ClientSession() as session:
            for why in ("the model is still loading", "no replica serves (there is none)"):
                async with session.get(f"{port.url}/ready") as response:
                    assert response.status == 503
                    assert why in await response.text()
                port.why_not_ready = lambda: why_none_serves([])
    finally:
        await port.close()


async def test_alone_it_keeps_the_gateway_from_being_ready(
    found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.02)
    url = f"http://{NAME}:8000"
    alone = Fleet(ReplicaOptions((url,), None), SchedulerOptions(), NO_WISH)
    starting = asyncio.create_task(alone.start())
    try:
        await until(lambda: len(alone.replicas) == 1)
        assert not alone.ready
        assert why_none_serves(alone.replicas) == f"no replica serves ({url}: {WHY})"
    finally:
        starting.cancel()
        await alone.close(1.0)
