"""Three CPU replicas of a real model: their answer is one server's, and one that is killed costs nothing."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Iterator

import aiohttp
import numpy as np
import pytest

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_replica_processes import child_pids, replicas
from tests.wire import EMBED

pytestmark = [pytest.mark.timeout(240), pytest.mark.long, pytest.mark.usefixtures("minilm_folder")]

FLAGS = ("--port", "0", "--threads", "1")
WORDS = [
    "a",
    "rose",
    "is",
    "a",
    "flower",
    "and",
    "a",
    "ship",
    "is",
    "not",
    "one",
    "of",
    "them",
    "however",
    "it",
    "may",
    "be",
    "called",
    "in",
    "spring",
]


def texts(count: int, first: int = 0) -> list[str]:
    """Of 1 to 40 words, no two alike."""
    return [
        " ".join([str(first + n), *(WORDS[(n * 7 + i) % len(WORDS)] for i in range(n % 40))])
        for n in range(count)
    ]


def vectors(answer: dict[str, list[dict[str, str]]]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]
    return np.stack(rows)


@pytest.fixture(scope="module")
def three() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS, "--replicas", "3") as process:
        yield process.ready(120.0)


def test_2000_texts_are_in_order_and_equal_to_one_server_s(three: ServerProcess) -> None:
    body = {"input": texts(2000), "encoding_format": "base64"}
    status, answer = three.post(EMBED, body)
    assert status == 200
    assert all(replica["chunks"] > 0 for replica in replicas(three).values())
    with ServerProcess(*FLAGS) as alone:
        status, wanted = alone.ready(120.0).post(EMBED, body)
    assert status == 200
    assert [item["index"] for item in answer["data"]] == list(range(2000))
    np.testing.assert_allclose(vectors(answer), vectors(wanted), atol=2e-6)
    assert answer["usage"] == wanted["usage"]


def test_one_of_three_is_killed_under_load_and_no_request_fails(three: ServerProcess) -> None:
    body = {"input": texts(8), "encoding_format": "base64"}
    status, answer = three.post(EMBED, body)
    assert status == 200
    wanted = vectors(answer)
    name = next(iter(replicas(three)))
    ended = asyncio.Event()
    worst: list[float] = []

    async def client(session: aiohttp.ClientSession) -> None:
        while not ended.is_set():
            async with session.post(EMBED, json=body) as response:
                assert response.status == 200, await response.text()
                worst.append(float(np.abs(vectors(await response.json()) - wanted).max()))

    async def scenario() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(three.url, connector=connector) as session:
            clients = [asyncio.create_task(client(session)) for _ in range(12)]
            await asyncio.sleep(2)
            os.kill(child_pids(three, name)[-1], signal.SIGKILL)
            await asyncio.sleep(12)
            ended.set()
            await asyncio.gather(*clients)

    asyncio.run(scenario())
    assert len(worst) > 40
    assert max(worst) < 2e-6
    assert replicas(three)[name]["state"] in ("ready", "half_open", "ejected")
    assert len(child_pids(three, name)) == 2
