"""A gateway in front of engines in other processes: one killed, one slow, all gone, and how they end with it.

Scripted engines: what is looked at here is who runs what. With a real model: tests marked long.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.attempts import best_of, in_time
from tests.e2e.fake_server import DIMENSIONS, SLOW, STEP_S
from tests.e2e.server_process import FAKE, ServerProcess, held_port
from tests.e2e.test_drain import descendants
from tests.fakes import fake_vector
from tests.wire import EMBED

pytestmark = pytest.mark.timeout(60)

MODEL = ("--load-format", "dummy", "--port", "0")


def right(answer: Any, sequences: list[list[int]]) -> bool:
    """Whether the rows are those of `sequences`, in their order."""
    rows = np.array([item["embedding"] for item in answer["data"]], np.float32)
    wanted = np.stack([fake_vector(ids, rows.shape[1]) for ids in sequences])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    return bool(np.allclose(rows, wanted, atol=1e-6))


def replicas(server: ServerProcess) -> dict[str, dict[str, Any]]:
    status, described = server.get("/info")
    assert status == 200
    return {replica["name"]: replica for replica in described["replicas"]}


def wait_until(condition: Any, limit_s: float = 20.0) -> None:
    ends_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def child_pids(server: ServerProcess, name: str) -> list[int]:
    """Processes of the child `name`, by what they print."""
    lines = [line for line in server.stdout if line.startswith(f"[{name}] bouquet ")]
    return [int(line.rsplit(" ", 1)[1]) for line in lines]


@pytest.fixture
def three() -> Iterator[ServerProcess]:
    """A gateway with three engines of its own, whose steps take 3 ms."""
    env = {STEP_S: "0.003", DIMENSIONS: "8"}
    with ServerProcess(*MODEL, "--replicas", "3", program=FAKE, env=env) as process:
        yield process.ready()


@pytest.mark.timed
def test_one_keep_alive_client_is_spread_over_all(three: ServerProcess) -> None:
    before = replicas(three)
    connection = three.connect()
    for number in range(180):
        body = json.dumps({"input": [[200 + number] * (1 + number % 50)] * (1 + number % 3)})
        connection.request("POST", EMBED, body, {"Content-Type": "application/json"})
        assert connection.getresponse().read()
    connection.close()
    tokens = [replica["tokens"] - before[name]["tokens"] for name, replica in replicas(three).items()]
    assert len(tokens) == 3
    assert max(tokens) < 1.2 * sum(tokens) / 3
    assert min(tokens) > 0.8 * sum(tokens) / 3


def test_2000_inputs_are_split_and_come_back_in_order(three: ServerProcess) -> None:
    before = replicas(three)
    sequences = [[200 + number] * (1 + number % 20) for number in range(2000)]
    status, answer = three.post(EMBED, {"input": sequences})
    assert status == 200
    assert right(answer, sequences)
    assert all(replica["chunks"] > before[name]["chunks"] for name, replica in replicas(three).items())


def test_a_killed_engine_costs_no_request_and_comes_back(three: ServerProcess) -> None:
    name = next(iter(replicas(three)))
    pid = child_pids(three, name)[-1]
    ended = asyncio.Event()
    outcomes: list[bool] = []

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        while not ended.is_set():
            sequences = [[number, item] for item in range(40)]
            async with session.post(EMBED, json={"input": sequences}) as response:
                body = await response.json()
                outcomes.append(response.status == 200 and right(body, sequences))

    async def more(count: int) -> None:
        wanted = len(outcomes) + count
        while len(outcomes) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(three.url, connector=connector) as session:
            clients = [asyncio.create_task(client(session, number)) for number in range(24)]
            await more(50)
            os.kill(pid, signal.SIGSTOP)  # or nothing might be under way there at the moment of its death
            await asyncio.to_thread(wait_until, lambda: replicas(three)[name]["outstanding_tokens"] > 0)
            os.kill(pid, signal.SIGKILL)
            await more(200)
            ended.set()
            await asyncio.gather(*clients)

    asyncio.run(scenario())
    assert all(outcomes)
    assert replicas(three)[name]["failures"] > 0
    wait_until(lambda: replicas(three)[name]["state"] in ("ready", "half_open"))
    assert len(child_pids(three, name)) == 2
    assert any(f"{name} ended with status -9" in line for line in three.stdout)
    assert three.get("/ready")[0] == 200


@best_of(3)
def test_a_tenth_of_the_speed_is_less_than_15_percent_of_the_tokens() -> None:
    """Three servers of their own, in front of which a gateway without an engine is put."""
    servers = [
        ServerProcess(*MODEL, program=FAKE, env={STEP_S: step_s, DIMENSIONS: "8"})
        for step_s in ("0.004", "0.004", "0.04")
    ]
    try:
        urls = [server.ready().url for server in servers]
        listed = [part for url in urls for part in ("--replica", url)]
        with ServerProcess(*MODEL, "--no-engine", *listed, program=FAKE) as gateway:
            gateway.ready()
            wait_until(lambda: all(r["state"] == "ready" for r in replicas(gateway).values()))
            asyncio.run(_load(gateway.url, clients=16, requests=20))
            tokens = {name: replica["tokens"] for name, replica in replicas(gateway).items()}
            assert sum(tokens.values()) == 16 * 20 * 200
            in_time(tokens[urls[2]] < 0.15 * sum(tokens.values()), tokens)
            in_time(min(tokens[url] for url in urls[:2]) > 0.3 * sum(tokens.values()), tokens)
            asyncio.run(_load(gateway.url, clients=1, requests=60))
            alone = {name: replica["tokens"] - tokens[name] for name, replica in replicas(gateway).items()}
            in_time(alone[urls[2]] < 0.15 * sum(alone.values()), alone)
    finally:
        for server in servers:
            server.close()


async def _load(url: str, clients: int, requests: int) -> None:
    async def client(session: aiohttp.ClientSession, number: int) -> None:
        for _ in range(requests):
            sequences = [[number] * 20] * 10
            async with session.post(EMBED, json={"input": sequences}) as response:
                assert response.status == 200, await response.text()
                assert right(await response.json(), sequences)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await asyncio.gather(*(client(session, number) for number in range(clients)))


def test_a_shutdown_loses_no_request_and_leaves_no_child() -> None:
    env = {STEP_S: "0.01", DIMENSIONS: "8"}
    with ServerProcess(*MODEL, "--replicas", "2", program=FAKE, env=env) as server:
        server.ready()
        children = descendants(server.pid)
        assert len(children) == 2

        async def scenario() -> list[tuple[int, Any]]:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(server.url, connector=connector) as session:

                async def one(number: int) -> tuple[int, Any]:
                    first = SLOW if number < 2 else 200 + number
                    body = {"input": [[first, item] for item in range(30)]}
                    async with session.post(EMBED, json=body) as response:
                        return response.status, await response.json()

                calls = [asyncio.create_task(one(number)) for number in range(60)]
                while _outstanding(server) < 60:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                # As Ctrl-C and systemd do it: everyone gets the signal.
                for pid in (server.pid, *children):
                    os.kill(pid, signal.SIGTERM)
                return await asyncio.gather(*calls)

        answers = asyncio.run(scenario())
        assert server.wait() == 0
    assert [status for status, _ in answers] == [200] * 60
    for number, (_, answer) in enumerate(answers):
        first = SLOW if number < 2 else 200 + number
        assert right(answer, [[first, item] for item in range(30)])
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert server.stderr == []


def _outstanding(server: ServerProcess) -> int:
    connection = server.connect()
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    (line,) = (line for line in page.splitlines() if line.startswith("ivy_requests_outstanding "))
    return int(line.split()[1])


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_a_killed_gateway_leaves_no_child(moment: str) -> None:
    with ServerProcess(*MODEL, "--replicas", "2", program=FAKE) as server:
        if moment == "serving":
            server.ready()
        wait_until(lambda: len(descendants(server.pid)) == 2)
        children = descendants(server.pid)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def test_without_a_replica_nothing_is_ready_and_requests_are_told_so() -> None:
    with (
        held_port() as port,
        ServerProcess(
            *MODEL, "--no-engine", "--replica", f"http://127.0.0.1:{port}", program=FAKE
        ) as gateway,
    ):
        gateway.url = gateway.wait_for("waiting for replicas").split(", ")[-1].split()[0]
        assert gateway.get("/health")[0] == 200
        assert gateway.get("/ready")[0] == 503
        status, told = gateway.post(EMBED, {"input": [1]})
        assert (status, told["error"]["code"]) == (503, "unavailable")
        flags = ("--load-format", "dummy", "--port", str(port))
        with ServerProcess(*flags, program=FAKE) as replica:
            replica.ready()
            gateway.ready(10.0)
            assert gateway.get("/ready")[0] == 200
            assert gateway.post(EMBED, {"input": [1]})[0] == 200
            replica.signal(signal.SIGKILL)
            replica.wait()
        status, told = gateway.post(EMBED, {"input": [1]})
        assert (status, told["error"]["code"]) == (503, "unavailable")
        wait_until(lambda: gateway.get("/ready")[0] == 503, limit_s=5.0)
        status, told = gateway.post(EMBED, {"input": [1]})
        assert (status, told["error"]["code"]) == (503, "unavailable")
        assert "no replica serves" in told["error"]["message"]
        assert gateway.get("/health")[0] == 200


def test_a_child_that_cannot_start_ends_the_start_with_its_own_words(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    with ServerProcess("--port", "0", "--device", "cuda:97,cuda:98", env=env) as server:
        assert server.wait() == 1
    (line,) = server.stderr
    assert line.startswith("error: cuda:9")
    assert "no such CUDA device" in line
    assert not list(tmp_path.glob("bouquet-*"))
