"""A server on the GPU that dies, is told to end, is killed, or is left by its clients."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import torch

from tests.e2e.server_process import REAL, ServerProcess
from tests.gpu.faulty_server import DEADLY
from tests.wire import WireAnswer, post, read_answer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FLAGS = ("--device", "cuda", "--model", "pplx-embed", "--load-format", "dummy", "--port", "0")
FAULTY = ("-m", "tests.gpu.faulty_server")
READY_S = 240.0
SLACK_BYTES = 64 << 20
LEAST_MODEL_BYTES = 500 << 20
WIDTH = 1024
# All answers are there so soon after the first that says that the engine is dead.
DEATH_S = 0.25
ACCEPTED_GAUGE = "ivy_requests_outstanding "

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def free_bytes() -> int:
    """Of the device, whoever has the rest."""
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def memory_is_given_back() -> Iterator[None]:
    before = free_bytes()
    yield
    deadline_s = time.monotonic() + 10
    while before - free_bytes() > SLACK_BYTES:
        assert time.monotonic() < deadline_s, f"{before - free_bytes()} bytes are still in use"
        time.sleep(0.1)


def started(program: Sequence[str] = REAL) -> ServerProcess:
    return ServerProcess(*FLAGS, program=program)


async def connected(server: ServerProcess) -> Streams:
    address = urlsplit(server.url)
    return await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)


def ids_of(number: int, sequences: int = 1, length: int = 16) -> list[list[int]]:
    """Different for every number; none begins with DEADLY."""
    return [[1000 + number, 7 + row, *range(2000, 1998 + length)] for row in range(sequences)]


async def asked(server: ServerProcess, ids: list[list[int]]) -> tuple[WireAnswer, float]:
    """The answer on a connection of its own, and when it was there (monotonic seconds)."""
    reader, writer = await connected(server)
    writer.write(post({"input": ids}))
    answer = await read_answer(reader)
    writer.close()
    return answer, time.monotonic()


def vectors(answer: WireAnswer) -> torch.Tensor:
    assert answer.status == 200, answer.body[:300]
    return torch.tensor([item["embedding"] for item in answer.value["data"]])


def test_sigkill_gives_the_device_s_memory_back(memory_is_given_back: None) -> None:
    before = free_bytes()
    with started() as server:
        server.ready(READY_S)
        assert server.post("/v1/embeddings", {"input": [1, 2, 3]})[0] == 200
        assert before - free_bytes() > LEAST_MODEL_BYTES
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL


def test_a_device_that_breaks_fails_all_in_flight_and_ends_the_process(memory_is_given_back: None) -> None:
    """64 in flight: each is answered, the vectors of those before the fault are theirs, status 3."""

    async def scenario(server: ServerProcess) -> list[tuple[WireAnswer, float]]:
        requests = [ids_of(number, 8, 512) for number in range(63)]
        requests.insert(32, [[DEADLY, 1, 2]])
        return await asyncio.gather(*(asked(server, ids) for ids in requests))

    with started(FAULTY) as server:
        server.ready(READY_S)
        answers = asyncio.run(scenario(server))
        failed = [(answer, at_s) for answer, at_s in answers if answer.status != 200]
        assert failed and {answer.status for answer, _ in failed} == {503}
        assert {answer.code for answer, _ in failed} == {"unavailable"}
        times_s = [at_s for _, at_s in failed]
        assert max(times_s) - min(times_s) < DEATH_S
        assert server.wait(10) == 3
    for answer, _ in answers:
        if answer.status == 200:
            assert vectors(answer).shape == (8, WIDTH) and vectors(answer).isfinite().all()


def test_told_to_end_with_200_in_flight_it_answers_all(memory_is_given_back: None) -> None:
    async def scenario(server: ServerProcess) -> list[tuple[WireAnswer, float]]:
        async def told() -> None:
            await asyncio.sleep(0.05)
            server.signal(signal.SIGTERM)

        requests = [ids_of(number, 16, 256) for number in range(200)]
        *answers, _ = await asyncio.gather(*(asked(server, ids) for ids in requests), told())
        return answers  # type: ignore[return-value]

    with started() as server:
        server.ready(READY_S)
        alone = vectors(asyncio.run(asked(server, ids_of(17, 16, 256)))[0])
        answers = asyncio.run(scenario(server))
        assert server.wait(40) == 0
    found = [vectors(answer) for answer, _ in answers]
    assert len(found) == 200 and all(of_one.shape == (16, WIDTH) for of_one in found)
    assert torch.nn.functional.cosine_similarity(found[17], alone).min() > 0.9999


def test_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    """1000, 48 at a time, half of them by a reset: gauges are 0 again and later answers exact."""

    async def leaving(server: ServerProcess, number: int, turns: asyncio.Semaphore) -> None:
        async with turns:
            reader, writer = await connected(server)
            if number % 2:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request = post({"input": ids_of(number, 4, 200)})
            writer.write(request[: rng.randrange(len(request) + 1) if number % 3 == 0 else len(request)])
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 100_000)), rng.uniform(0.0, 0.02))
            writer.close()

    async def scenario(server: ServerProcess) -> None:
        turns = asyncio.Semaphore(48)
        await asyncio.gather(*(leaving(server, number, turns) for number in range(1000)))

    rng = random.Random(4)
    with started() as server:
        server.ready(READY_S)
        before = vectors(asyncio.run(asked(server, ids_of(5, 4, 200)))[0])
        asyncio.run(scenario(server))
        deadline_s = time.monotonic() + 10
        while gauge(server, ACCEPTED_GAUGE) > 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        after = vectors(asyncio.run(asked(server, ids_of(5, 4, 200)))[0])
        assert torch.nn.functional.cosine_similarity(before, after).min() > 0.9999
        assert not [line for line in server.stderr if "ERROR" in line]


def gauge(server: ServerProcess, name: str) -> float:
    """A value of /metrics."""
    connection = server.connect()
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    (line,) = (line for line in page.splitlines() if line.startswith(name))
    return float(line.split()[1])
