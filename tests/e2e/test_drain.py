"""A process that is told to end while 200 requests are under way, and one that is killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.e2e.fake_server import DEADLY, DIMENSIONS, HANGING, SLOW, STEP_S
from tests.e2e.server_process import FAKE, ServerProcess
from tests.fakes import fake_vector
from tests.http.served import byte_backend, text_ids
from tests.wire import EMBED, WireAnswer, post, read_answer

pytestmark = pytest.mark.timeout(90)

WIDTH = 256
DRAIN_S = 30.0
BATCH = 16
SMALL, LARGE, TEXTS, UPLOADS = 159, 20, 10, 10  # and one that holds the engine while the others come
BLOCKER = [[SLOW]] * 3 * BATCH
LARGE_ITEMS = 300  # of 256 floats in JSON: some 1.5 MB
HUGE_ITEMS = 2000  # 10 MB: more than sockets hold
SLOW_READ_S = 7.0
HUNG_S = 1.0
HUNG = f"tokens has not finished in step_timeout_s={HUNG_S:g}"
# Long enough to be tokenised beside the loop for a while, and cut to what the model takes.
TEXT = "word " * 100_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(byte_backend().to_str())
    limits = ("--drain-s", str(DRAIN_S), "--max-batch-seqs", str(BATCH))
    flags = ("--load-format", "dummy", "--port", "0", "--tokenizer", str(tokenizer), *limits)
    env = {STEP_S: "0.005", DIMENSIONS: str(WIDTH)}
    with ServerProcess(*flags, program=FAKE, env=env) as process:
        yield process.ready()


class Client:
    """One connection with a small window, so that large answers wait in the server."""

    def __init__(self, ids: list[list[int]] | None = None, text: str | None = None) -> None:
        self.ids = ids
        self._request = post({"input": text if ids is None else ids, "truncate": True})
        self._cut = len(self._request)
        self._reads_after_s = 0.0

    def uploading(self) -> Client:
        """Keeps its last bytes until the server is told to end."""
        self._cut -= 5
        return self

    def slow(self) -> Client:
        """Reads nothing until all are answered."""
        self._reads_after_s = SLOW_READ_S
        return self

    async def send(self, port: int) -> None:
        """Connect, and send the request."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
        self.writer.write(self._request[: self._cut])
        await self.writer.drain()

    async def answer(self) -> WireAnswer:
        self.writer.write(self._request[self._cut :])
        await asyncio.sleep(self._reads_after_s)
        return await read_answer(self.reader)


def clients() -> list[Client]:
    small = [Client([[1000 + n, n, n]]) for n in range(SMALL)]
    large = [Client([[n, item] for item in range(LARGE_ITEMS)]).slow() for n in range(LARGE)]
    texts = [Client(text=TEXT) for _ in range(TEXTS)]
    uploads = [Client([[n, n]]).uploading() for n in range(UPLOADS)]
    return [Client(BLOCKER), *texts, *uploads, *large, *small]


def right(client: Client, answer: WireAnswer) -> bool:
    """Whether the vectors are those of the client's own ids."""
    rows = [item["embedding"] for item in answer.value["data"]]
    ids = client.ids or [[*text_ids(TEXT[:600])[:511], 257]]
    wanted = np.stack([fake_vector(sequence, WIDTH) for sequence in ids])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    return bool(np.allclose(np.array(rows, np.float32), wanted, atol=1e-6))


async def outstanding(server: ServerProcess) -> int:
    """Requests being worked on, as /metrics says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    page = (await read_answer(reader)).body.decode()
    writer.close()
    (line,) = (line for line in page.splitlines() if line.startswith("ivy_requests_outstanding "))
    return int(line.split()[1])


async def refused(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> WireAnswer:
    writer.write(post({"input": [1]}))
    return await read_answer(reader)


def test_200_in_flight_are_all_answered_whole_and_new_ones_are_refused(server: ServerProcess) -> None:
    port = urlsplit(server.url).port
    assert port is not None

    async def scenario() -> tuple[list[Client], list[WireAnswer], list[WireAnswer]]:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in kept:
            writer.write(post({"input": [1]}))
            await read_answer(reader)
        under_way = clients()
        for client in under_way:
            await client.send(port)
        while await outstanding(server) < 200:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        server.signal(signal.SIGTERM)
        await asyncio.to_thread(server.wait_for, "draining")
        late = [await refused(*kept[0]), await refused(*await asyncio.open_connection("127.0.0.1", port))]
        answers = await asyncio.gather(*(client.answer() for client in under_way))
        return under_way, answers, late

    began_s = time.monotonic()
    under_way, answers, late = asyncio.run(scenario())
    assert server.wait() == 0
    assert time.monotonic() - began_s < DRAIN_S
    assert [answer.status for answer in answers] == [200] * 200
    assert all(right(client, answer) for client, answer in zip(under_way, answers, strict=True))
    for answer in late:
        assert (answer.status, answer.headers["connection"]) == (503, "close")
    assert server.stderr == []


def test_an_answer_that_is_read_slowly_at_the_end_comes_whole(server: ServerProcess) -> None:
    """Its last bytes wait in the process when everything else is over."""
    port = urlsplit(server.url).port
    assert port is not None
    client = Client([[1, item] for item in range(HUGE_ITEMS)])

    async def scenario() -> int:
        await client.send(port)
        head = await client.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        server.signal(signal.SIGTERM)
        taken = 0
        while piece := await client.reader.read(16_384):
            taken += len(piece)
            await asyncio.sleep(1.5 * len(piece) / length)
        return length - taken

    assert asyncio.run(scenario()) == 0
    assert server.wait() == 0


@pytest.mark.timed
def test_the_engine_s_death_with_64_in_flight_answers_all_and_ends_the_process(server: ServerProcess) -> None:
    port = urlsplit(server.url).port
    assert port is not None

    async def scenario() -> tuple[list[WireAnswer], float]:
        under_way = [Client([[SLOW]] * BATCH), *(Client([[n]]) for n in range(62)), Client([[DEADLY]])]
        for client in under_way:
            await client.send(port)
        answers = await asyncio.gather(*(client.answer() for client in under_way))
        return answers, time.monotonic()

    answers, ended_s = asyncio.run(scenario())
    assert server.wait() == 3
    assert time.monotonic() - ended_s < 1.0
    dead = [answer for answer in answers if answer.status == 503]
    assert len(answers) == 64 and dead
    assert {answer.status for answer in answers} <= {200, 503}
    assert all("scripted death" in answer.value["error"]["message"] for answer in dead)
    assert server.stderr == ["error: the engine is dead: scripted death"]


@pytest.mark.timed
def test_a_step_that_hangs_answers_all_and_ends_the_process() -> None:
    """Its probes say so until it is gone; nobody has to kill it."""
    flags = ("--load-format", "dummy", "--port", "0", "--step-timeout-s", str(HUNG_S))
    with ServerProcess(*flags, program=FAKE) as server:
        port = urlsplit(server.ready().url).port
        assert port is not None

        async def scenario() -> tuple[list[WireAnswer], list[int], float]:
            under_way = [Client([[HANGING]]), *(Client([[n]]) for n in range(63))]
            for client in under_way:
                await client.send(port)
            began_s = time.monotonic()
            probing = asyncio.create_task(probe(port))
            answers = await asyncio.gather(*(client.answer() for client in under_way))
            return answers, await probing, time.monotonic() - began_s

        answers, probes, taken_s = asyncio.run(scenario())
        assert server.wait() == 3
        (line,) = server.stderr
        assert line.startswith("error: the engine is dead: a step of ") and line.endswith(HUNG)
    assert HUNG_S * 0.8 < taken_s < HUNG_S + 2.0
    assert [answer.status for answer in answers] == [503] * 64
    assert all(HUNG in answer.value["error"]["message"] for answer in answers)
    assert probes[0] == 200 and set(probes) <= {200, 503} and probes == sorted(probes)


async def probe(port: int) -> list[int]:
    """What /ready says, asked all the time, until nobody is there to ask."""
    statuses = []
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            statuses.append((await read_answer(reader)).status)
            writer.close()
            await asyncio.sleep(0.002)
    return statuses


def descendants(pid: int) -> set[int]:
    """Processes that `pid` started, and those that they did."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may have ended since
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_a_killed_server_leaves_neither_children_nor_its_port(moment: str) -> None:
    """The real one, with a thread for steps and threads for tokenisation."""
    flags = ("--model", "minilm", "--load-format", "dummy")
    with ServerProcess(*flags, "--port", "0") as process:
        if moment == "loading":
            process.wait_for("loading")
            port = 0
        else:
            port = urlsplit(process.ready().url).port or 0
            assert process.post(EMBED, {"input": [1, 2, 3]})[0] == 200
        children = descendants(process.pid)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    left = [child for child in children if Path(f"/proc/{child}").exists()]
    assert left == []
    with socket.create_server(("127.0.0.1", port)):
        pass
