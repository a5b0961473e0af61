"""One client: sends the requests of one stream from one event loop and writes down what happens.

It decides nothing about warm-up or the end of a measurement; whoever runs it does, from its beats.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np

from loadgen.apis import APIS, Answer, decode_checked
from loadgen.arrivals import Alarm, arrivals
from loadgen.http1 import Connection, Response, connect, request_bytes
from loadgen.plan import LoadgenError, Source, Stream, Target
from loadgen.recording import Beat, Recorder, Recording
from loadgen.workload import distinct_requests, inputs

BEAT_S = 0.25
WATCH_S = 0.5
# After an error or a refusal that names no time, so that a dead server is not asked 10 000 times a second.
PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
PRIME_ATTEMPTS = 40
# Beyond this many requests of an open loop under way in one client, further ones count as errors.
MAX_OPEN = 4096


@dataclass(frozen=True)
class Job:
    """What one client does. index: which of the stream's processes it is.

    open_s: how long an open loop sends. max_run_s: it ends by itself after this, whatever it is told.
    keep: answers to keep for a check.
    """

    target: Target
    stream: Stream
    source: Source
    index: int
    open_s: float
    max_run_s: float
    timeout_s: float
    keep: int = 0


class Client:
    """Use: `prepare`, then `run` once; `stop` ends a closed loop."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._api = APIS[job.target.api]
        self._wires: list[bytes] = []
        self._sequences: list[int] = []
        self._tokens: list[int] = []
        self._recorder = Recorder(keep=job.keep)
        self._beats: list[Beat] = []
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._next = 0
        self._stopped = asyncio.Event()

    @property
    def last_beat(self) -> Beat:
        """Where it stands now."""
        recorder = self._recorder
        return Beat(perf_counter(), process_time(), len(recorder.done), len(recorder.errors))

    async def prepare(self) -> None:
        """Make the requests, open the connections, and see that the server answers as the API promises.

        Raises:
            LoadgenError: it does not.
            OSError: nothing listens.
        """
        job = self._job
        rng = np.random.default_rng([job.source.seed, job.index])
        prepared = inputs(job.stream, job.source, rng)
        for _, item in zip(range(distinct_requests(job.stream)), prepared, strict=False):
            body = self._api.encode(item, job.target.model)
            target = job.target
            self._wires.append(
                request_bytes(target.netloc, self._api.path, self._api.content_type, body, target.api_key)
            )
            self._sequences.append(len(item))
            self._tokens.append(item.tokens or 0)
        # Only the server knows how many tokens a text has; each is asked once.
        for index in range(len(self._wires) if self._tokens[0] == 0 else 1):
            answer = await self._prime(index)
            self._tokens[index] = self._tokens[index] or answer.prompt_tokens or 0
        for _ in range(job.stream.in_flight):
            self._idle.append(await self._connect())

    async def run(self, start_s: float) -> Recording:
        """Send from `start_s` (perf_counter) until stopped, or to the end of an open loop's schedule."""
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._job.max_run_s, self.stop)
        watch = loop.create_task(self._watch())
        await asyncio.sleep(max(0.0, start_s - perf_counter()))
        self.beat()
        if self._job.stream.is_open:
            await self._open_loop(start_s)
        else:
            await asyncio.gather(*(self._closed_loop() for _ in range(self._job.stream.in_flight)))
        self.beat()
        watch.cancel()
        for connection in self._connections:
            connection.abort()
        return self._recorder.freeze(self._beats, self._sequences, self._tokens)

    def stop(self) -> None:
        """Send nothing new; what is under way is waited for."""
        self._stopped.set()

    def beat(self) -> Beat:
        """Write down where it stands."""
        self._beats.append(self.last_beat)
        return self._beats[-1]

    async def _closed_loop(self) -> None:
        while not self._stopped.is_set():
            pause_s = await self._one(None)
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _open_loop(self, start_s: float) -> None:
        job, running = self._job, set[asyncio.Task[float]]()
        with Alarm() as alarm:
            for offset_s in arrivals(job.stream, job.index, job.source.seed):
                if offset_s > job.open_s or self._stopped.is_set():
                    break
                await alarm.wait_until(start_s + offset_s)
                if len(running) >= MAX_OPEN:
                    self._recorder.failed(
                        start_s + offset_s, f"client limit of {MAX_OPEN} requests under way"
                    )
                    continue
                task = asyncio.create_task(self._one(start_s + offset_s))
                running.add(task)
                task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running)

    async def _one(self, due_s: float | None) -> float:
        """Send the next request. Returns the seconds to wait before the one after it, in a closed loop."""
        number = self._next % len(self._wires)
        self._next += 1
        sent_s = perf_counter()
        intended_s = due_s or sent_s
        try:
            connection = await self._connection()
            sent_s = perf_counter()
            response = await connection.send(self._wires[number])
        except OSError as error:
            self._recorder.failed(intended_s, _kind(error))
            return PAUSE_S
        self._recorder.answered(number, intended_s, sent_s, response)
        if connection.usable:
            self._idle.append(connection)
        return 0.0 if response.status == 200 else _pause_s(response)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._connections.discard(connection)
        return await self._connect()

    async def _connect(self) -> Connection:
        connection = await connect(self._job.target.host, self._job.target.port)
        self._connections.add(connection)
        return connection

    async def _prime(self, index: int) -> Answer:
        for _ in range(PRIME_ATTEMPTS):
            connection = await self._connection()
            async with asyncio.timeout(self._job.timeout_s):
                response = await connection.send(self._wires[index])
            if connection.usable:
                self._idle.append(connection)
            if response.status == 200:
                return decode_checked(self._api, response, self._sequences[index])
            if response.status not in (429, 503):
                break
            await asyncio.sleep(_pause_s(response))
        raise LoadgenError(f"the server answers {response.status}: {_message(response)}")

    async def _watch(self) -> None:
        """Ends requests that take too long; one timer for all, since one a request costs 2 µs."""
        while True:
            await asyncio.sleep(WATCH_S)
            late_s = perf_counter() - self._job.timeout_s
            for connection in list(self._connections):
                if 0.0 < connection.sent_s < late_s:
                    connection.abort(f"no answer in {self._job.timeout_s:g} s")
                    self._connections.discard(connection)


def _kind(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return f"connection: {error}"


def _pause_s(response: Response) -> float:
    milliseconds = response.header("retry-after-ms")
    seconds = response.header("retry-after")
    try:
        asked_s = float(milliseconds) / 1e3 if milliseconds else float(seconds or PAUSE_S)
    except ValueError:
        asked_s = PAUSE_S
    return min(max(asked_s, 0.001), MAX_PAUSE_S)


def _message(response: Response) -> str:
    """What the server says went wrong, on one line."""
    try:
        error = json.loads(response.body)["error"]
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = response.body.decode("utf-8", "replace")
    return " ".join(text.split())[:300]
