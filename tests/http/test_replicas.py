"""A fleet over real servers on loopback: which replicas it takes, and how it follows where they are."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from gateway.drain import DRAIN
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.replicas import client
from gateway.replicas.endpoints import Listing
from gateway.replicas.replica import MAX_FAILURES, State
from gateway.routes import sequences
from rose.batch import EngineInfo
from scheduler.errors import DeadlineExpired, StepFailed
from tests.fakes import FakeEngine, fake_info
from tests.http.fleets import fleet, settled
from tests.http.served import Served, serving, until

pytestmark = pytest.mark.timeout(30)


async def test_work_is_done_by_all_of_them() -> None:
    async with serving() as one, serving() as two, fleet(one, two) as fleeting:
        await settled(fleeting, "ready", "ready")
        fleeting.balancer._clock = lambda: 0.0  # or one that others' work made slow would get less
        await fleeting.work(40)
        assert (len(one.engine.batches), len(two.engine.batches)) == (20, 20)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "another"}, "its model is 'another', not 'fake'"),
        ({"dtype": "bfloat16"}, "its dtype is 'bfloat16', not 'float32'"),
        ({"dimensions": 9}, "its dimensions is 9, not 8"),
        ({"normalize": False}, "its normalize is False, not True"),
        ({"max_model_len": 100}, "its max_model_len is 100; the others take 512"),
        ({"max_batch_tokens": 300}, "its max_batch_tokens is 300; the others take sequences of 512"),
    ],
)
async def test_one_that_serves_something_else_is_refused_by_name(
    change: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    info: EngineInfo = replace(fake_info(), **change)
    wanted: dict[str, object] = {"model": "fake", "dimensions": 8}
    async with (
        serving() as right,
        serving(engine=FakeEngine(info=info)) as wrong,
        fleet(right, wanted=wanted) as fleeting,
    ):
        await settled(fleeting, "ready")
        fleeting.fleet._listing = Listing((right.url, wrong.url), None)
        await settled(fleeting, "ready", "refused")
        assert words in fleeting.replica(wrong).reason
        assert f"replica {wrong.url} is refused: {fleeting.replica(wrong).reason}" in caplog.text
        await fleeting.work()
        assert not wrong.engine.batches


async def test_unlike_gpus_serve_together() -> None:
    """Whichever is found first: how much one step takes is a matter of their memory."""
    infos = [replace(fake_info(), max_batch_tokens=tokens) for tokens in (131_072, 16_384)]
    for first, second in (infos, infos[::-1]):
        async with (
            serving(engine=FakeEngine(info=first)) as one,
            serving(engine=FakeEngine(info=second)) as two,
            fleet(one) as fleeting,
        ):
            await settled(fleeting, "ready")
            fleeting.fleet._listing = Listing((one.url, two.url), None)
            await settled(fleeting, "ready", "ready")


async def test_one_that_takes_less_than_a_chunk_is_refused() -> None:
    few = GatewayOptions(max_items=9)
    async with serving() as right, serving(few) as wrong, fleet(right, wrong) as fleeting:
        await until(lambda: fleeting.replica(wrong).state is State.REFUSED)
        assert "it takes max_items 9 a request" in fleeting.replica(wrong).reason


@pytest.mark.parametrize("replicas", [{"urls": ["http://x"], "file": None}, {"urls": [], "file": "list"}])
async def test_a_gateway_is_no_replica_but_one_with_engines_of_its_own_is(replicas: dict[str, Any]) -> None:
    """One that lists itself would send chunks round in circles."""
    mine = {"urls": [], "file": None, "devices": ["cpu", "cpu"]}
    settings = {"settings": {"replicas": mine}}
    async with (
        serving(describe=lambda: settings) as node,
        serving(describe=lambda: {"settings": {"replicas": replicas}}) as gateway,
        fleet(node, gateway) as fleeting,
    ):
        await until(lambda: fleeting.replica(gateway).state is State.REFUSED)
        assert "it is a gateway with --replica" in fleeting.replica(gateway).reason
        assert fleeting.replica(node).state is State.READY


async def test_redirects_are_not_followed_and_endless_pages_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_MOST_PAGE_BYTES", 1 << 16)

    async def elsewhere(_: aiohttp.web.Request) -> aiohttp.web.Response:
        raise aiohttp.web.HTTPFound(f"{right.url}/info")

    async def endless(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        answer = aiohttp.web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 4096)

    async with serving() as right, AsyncExitStack() as stack:
        urls = [await junk(stack, handler) for handler in (elsewhere, endless)]
        async with fleet(right, urls=tuple(urls)) as fleeting:
            reasons = lambda: [replica.reason for replica in fleeting.fleet.replicas]  # noqa: E731
            await until(
                lambda: "/info gives more than 65536 bytes" in reasons() and "status 302" in reasons()
            )
            assert fleeting.states.count("ready") == 1


async def junk(stack: AsyncExitStack, info: Callable[[aiohttp.web.Request], Any]) -> str:
    """The URL of a server with such an /info."""
    app = aiohttp.web.Application()
    app.router.add_get("/info", info)
    runner = aiohttp.web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_a_server_that_is_no_replica_is_refused() -> None:
    async def info(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"model_id": "x"})

    app = aiohttp.web.Application()
    app.router.add_get("/info", info)
    runner = await listen(app, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with serving() as right, fleet(right, urls=(url,)) as fleeting:
        await until(lambda: sorted(fleeting.states) == ["ready", "refused"])
        await fleeting.work()
    await runner.cleanup()


@pytest.mark.parametrize("key", [None, "wrong", "right"])
async def test_a_key_is_sent_where_one_is_wanted(key: str | None) -> None:
    keyed = GatewayOptions(api_keys=("right",))
    async with serving(keyed) as locked, serving() as other, fleet(locked, other, key=key) as fleeting:
        await until(lambda: "ready" in fleeting.states)
        await asyncio.sleep(0.1)
        replica = fleeting.replica(locked)
        assert replica.state is (State.READY if key == "right" else State.CONNECTING)
        assert ("key" in replica.reason) is (key != "right")
        await fleeting.work()


def put(file: Path, text: str) -> None:
    """Replace it whole: what is written in place is empty for a moment, and so is the list then."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


async def test_the_file_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    async with serving() as one, serving() as two:
        file.write_bytes(f"\ufeff# ours\r\n{one.url}\r\n\n".encode())
        async with fleet(file=file) as fleeting:
            await fleeting.work(4)
            put(file, f"{one.url}\n{two.url}/\n")
            await settled(fleeting, "ready", "ready")
            put(file, two.url)
            await until(lambda: [r.name for r in fleeting.fleet.replicas] == [two.url])
            one.engine.batches.clear()
            await fleeting.work()
            assert not one.engine.batches
            for broken in ("http://", "not a url"):
                put(file, broken)
                await asyncio.sleep(0.1)
                assert [r.name for r in fleeting.fleet.replicas] == [two.url]
            file.unlink()
            await asyncio.sleep(0.1)
            await fleeting.work(4)


async def test_a_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 and 127.0.0.3 are this machine as well."""
    found: list[str] = ["127.0.0.2"]
    loop = asyncio.get_running_loop()
    ask = type(loop).getaddrinfo

    async def getaddrinfo(self: Any, host: str, port: Any, **more: Any) -> Any:
        if host != "replicas.test":
            return await ask(self, host, port, **more)
        if not found:
            raise socket.gaierror("no such name")
        v6 = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))]
        return v6 + [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(type(loop), "getaddrinfo", getaddrinfo, raising=False)
    async with AsyncExitStack() as stack:
        engines = [FakeEngine(), FakeEngine()]
        runners = []
        port = 0
        for engine, address in zip(engines, ("127.0.0.2", "127.0.0.3"), strict=True):
            served = await stack.enter_async_context(serving(engine=engine))
            runner = await listen(served.app, address, port)
            port = runner.addresses[0][1]
            runners.append(runner)
        url = f"http://replicas.test:{port}"
        async with fleet(urls=(url,)) as fleeting:
            await fleeting.work(10)
            assert engines[0].batches and not engines[1].batches
            found.append("127.0.0.3")
            await settled(fleeting, "ready", "ready")
            assert {r.name for r in fleeting.fleet.replicas} == {
                f"{url} at 127.0.0.2",
                f"{url} at 127.0.0.3",
            }
            await fleeting.work(20)
            assert engines[1].batches
            found.clear()
            await asyncio.sleep(0.1)
            assert fleeting.states == ["ready", "ready"]
            found.append("127.0.0.3")
            await settled(fleeting, "ready")
            engines[0].batches.clear()
            await fleeting.work(10)
            assert not engines[0].batches
        for runner in runners:
            await runner.cleanup()


async def test_a_replica_that_goes_and_comes_is_taken_back() -> None:
    async with serving() as one, serving() as two, fleet(one, two) as fleeting:
        await settled(fleeting, "ready", "ready")
        one.app[DRAIN].begun = True  # a shutdown, as one sees it that takes time
        await until(lambda: fleeting.replica(one).state is State.EJECTED)
        assert "shutting down" in fleeting.replica(one).reason
        before = len(one.engine.batches)
        await fleeting.work()
        assert len(one.engine.batches) == before
        one.app[DRAIN].begun = False
        await until(lambda: fleeting.replica(one).in_service)
        await fleeting.work()
        assert fleeting.replica(one).state is State.READY
        assert len(one.engine.batches) > before


@asynccontextmanager
async def proxied(behind: Served, loses: Callable[[str], bool]) -> AsyncIterator[str]:
    """The URL of what hands on to a replica what it is asked. loses: what it never answers, by its path."""

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
        body = await request.read()
        if loses(request.path):
            await asyncio.sleep(60)
        headers = {"Content-Type": "application/msgpack"}
        async with (
            aiohttp.ClientSession(behind.url, headers=headers) as session,
            session.request(request.method, request.path, data=body) as response,
        ):
            return aiohttp.web.Response(body=await response.read(), status=response.status)

    app = aiohttp.web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = await listen(app, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await asyncio.wait_for(runner.cleanup(), 5)


async def test_one_that_does_not_answer_is_given_up_and_its_work_done_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_PROBE_S", 0.1)
    deaf = asyncio.Event()
    async with (
        serving() as behind,
        serving() as other,
        proxied(behind, lambda _: deaf.is_set()) as url,
        fleet(other, urls=(url,)) as fleeting,
    ):
        await settled(fleeting, "ready", "ready")
        await fleeting.work(4)
        deaf.set()
        began_s = time.monotonic()
        await fleeting.work(10)
        assert time.monotonic() - began_s < 5
        await until(lambda: sorted(fleeting.states) == ["ejected", "ready"])


async def test_a_chunk_that_is_lost_between_us_ends_when_it_could_not_come_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its replica answers everything else."""
    monkeypatch.setattr(client, "_WAY_S", 0.1)
    lossy = asyncio.Event()
    async with (
        serving() as behind,
        proxied(behind, lambda path: lossy.is_set() and path == sequences.PATH) as url,
        fleet(urls=(url,), step_timeout_s=0.2) as fleeting,
        asyncio.timeout(20),
    ):
        await settled(fleeting, "ready")
        lossy.set()
        (replica,) = fleeting.fleet.replicas
        for failures in range(1, MAX_FAILURES + 1):
            assert replica.in_service
            began_s = time.monotonic()
            with pytest.raises(DeadlineExpired):
                await fleeting.balancer.run([np.array([5], np.int32)], deadline_s=0.3)
            assert 0.5 < time.monotonic() - began_s < 10
            assert (replica.failures, replica.outstanding_chunks) == (failures, 0)
        assert replica.ejections == 1
        lossy.clear()
        await until(lambda: replica.state is State.HALF_OPEN)
        await fleeting.work(4)
        assert replica.state is State.READY


async def test_the_kernel_asks_whether_a_silent_replica_is_still_there() -> None:
    async with serving() as server, fleet(server) as fleeting:
        await settled(fleeting, "ready")
        await until(lambda: server.connections > 0)
        (asking,) = fleeting.fleet._clients.values()
        connections = asking._session.connector._conns.values()
        await until(lambda: any(connections))
        sock = next(iter(connections))[0][0].transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60


async def test_a_vector_that_is_not_finite_is_told_with_its_own_place() -> None:
    engine = FakeEngine(info=replace(fake_info(), max_batch_seqs=8))
    async with serving(engine=engine) as one, fleet(one) as fleeting:
        ids = [np.array([number], np.int32) for number in range(20)]
        result = await fleeting.balancer.run(ids)
        assert len(result.vectors) == 20
        original = FakeEngine._outcome

        def broken(self: FakeEngine, batch: Any) -> Any:
            outcome = original(self, batch)
            rows = [n for n, start in enumerate(batch.cu_seqlens[:-1]) if batch.input_ids[start] == 13]
            return replace(outcome, non_finite=tuple(rows))  # type: ignore[type-var]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeEngine, "_outcome", broken)
            with pytest.raises(StepFailed, match=r"NaN or infinity for input\[13\]"):
                await fleeting.balancer.run(ids)
