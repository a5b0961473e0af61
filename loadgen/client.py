"""One client: sends the requests of one stream from one event loop and writes down what happens.

It decides nothing about warm-up or the end of a measurement; whoever runs it does, from its beats.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter, process_time

from loadgen.apis import APIS, Answer, decode_checked
from loadgen.arrivals import Alarm, arrivals
from loadgen.http1 import Response, request_bytes
from loadgen.plan import LoadgenError, Pacing, Source, Stream, Target
from loadgen.pool import Pool
from loadgen.recording import Beat, Recorder, Recording
from loadgen.requests import distinct, share

BEAT_S = 0.25
# After an error or a refusal that names no time, so that a dead server is not asked 10 000 times a second.
PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
PRIME_ATTEMPTS = 40
# So many requests of a trace are sent once before it starts, as its warm-up.
TRACE_PRIMES = 50
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
        self._pool = Pool(job.target.host, job.target.port, job.timeout_s)
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
        job, target = self._job, self._job.target
        for item in distinct(job.stream, job.source, job.index):
            body = self._api.encode(item, target.model)
            wire = request_bytes(target.netloc, self._api.path, self._api.content_type, body, target.api_key)
            self._wires.append(wire)
            self._sequences.append(len(item))
            self._tokens.append(item.tokens or 0)
        if not self._wires:
            raise LoadgenError("the trace has fewer requests than there are clients")
        for index in range(len(self._wires)):
            # Only the server knows how many tokens a text has; each is asked once.
            if index < self._prime_count or not self._tokens[index]:
                answer = await self._prime(index)
                self._tokens[index] = self._tokens[index] or answer.prompt_tokens or 0
        await self._pool.grow(job.stream.in_flight)

    @property
    def _prime_count(self) -> int:
        return TRACE_PRIMES if self._job.stream.pacing is Pacing.TRACE else 1

    async def run(self, start_s: float) -> Recording:
        """Send from `start_s` (perf_counter) until stopped, or to the end of an open loop's schedule."""
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._job.max_run_s, self.stop)
        beside = [loop.create_task(self._pool.watch())]
        if self._job.stream.polls:
            beside.append(loop.create_task(_stay_awake()))
        await asyncio.sleep(max(0.0, start_s - perf_counter()))
        self.beat()
        if self._job.stream.is_open:
            await self._open_loop(start_s)
        else:
            await asyncio.gather(*(self._closed_loop() for _ in range(self._job.stream.in_flight)))
        self.beat()
        for task in beside:
            task.cancel()
        self._pool.close()
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
            for offset_s in self._times():
                if offset_s > job.open_s or self._stopped.is_set():
                    break
                await alarm.wait_until(start_s + offset_s)
                if len(running) >= MAX_OPEN:
                    self._recorder.failed(
                        start_s + offset_s, f"client limit of {MAX_OPEN} requests under way"
                    )
                    self._next += 1  # a trace's others are sent at their own times
                    continue
                task = asyncio.create_task(self._one(start_s + offset_s))
                running.add(task)
                task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running)

    def _times(self) -> Iterator[float]:
        stream, index = self._job.stream, self._job.index
        if stream.pacing is Pacing.TRACE:
            return iter([entry.at_s for entry in share(stream, index)])
        return arrivals(stream, index, self._job.source.seed)

    async def _one(self, due_s: float | None) -> float:
        """Send the next request. Returns the seconds to wait before the one after it, in a closed loop."""
        number = self._next % len(self._wires)
        self._next += 1
        sent_s = perf_counter()
        intended_s = due_s or sent_s
        try:
            connection = await self._pool.take()
            sent_s = perf_counter()
            response = await connection.send(self._wires[number])
        except OSError as error:
            self._recorder.failed(intended_s, _kind(error))
            return PAUSE_S
        self._recorder.answered(number, intended_s, sent_s, response)
        self._pool.put(connection)
        return 0.0 if response.status == 200 else _pause_s(response)

    async def _prime(self, index: int) -> Answer:
        for _ in range(PRIME_ATTEMPTS):
            connection = await self._pool.take()
            async with asyncio.timeout(self._job.timeout_s):
                response = await connection.send(self._wires[index])
            self._pool.put(connection)
            if response.status == 200:
                return decode_checked(self._api, response, self._sequences[index])
            if response.status not in (429, 503):
                break
            await asyncio.sleep(_pause_s(response))
        raise LoadgenError(f"the server answers {response.status}: {_message(response)}")


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


async def _stay_awake() -> None:
    """Keep the loop from sleeping: a turn finds what has come, or nothing, and is followed by the next."""
    while True:  # noqa: ASYNC110 - that it is awake is all there is to wait for
        await asyncio.sleep(0)
