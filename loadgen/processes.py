"""Client processes: started once, given one job after another, ended with whoever started them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from types import TracebackType

import uvloop

from loadgen.client import BEAT_S, Client, Job
from loadgen.plan import LoadgenError

# An idle client ends within milliseconds of its pipe's end.
END_S = 2.0


@dataclass(frozen=True)
class Ready:
    """A client has made its requests and been answered once."""


@dataclass(frozen=True)
class Failed:
    """A client could not do its job."""

    message: str


@dataclass(frozen=True)
class Go:
    """Start sending at `start_s` (perf_counter)."""

    start_s: float


@dataclass(frozen=True)
class Stop:
    """Send nothing new."""


class Clients:
    """A pool of client processes, grown as needed; leaving it ends them."""

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(END_S)
        self.discard()

    def discard(self) -> None:
        """End them now, whatever they are doing."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes.clear()
        self._processes.clear()

    def pipes(self, count: int) -> list[Connection]:
        """`count` idle clients, as the pipes that lead to them: send Job, then Go, then Stop.

        They answer Ready or Failed, then Beats, then a Recording.
        """
        # A fresh interpreter each: a fork would share this process's state, and Python 3.14 no longer forks.
        context = multiprocessing.get_context("spawn")
        while len(self._pipes) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=client_main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self._pipes[:count]


def client_main(pipe: Connection) -> None:
    """The whole life of a client process: jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            job = pipe.recv()
            if isinstance(job, Stop):
                continue
            # A collection would show as a slow request; what one job leaves is collected before the next.
            gc.collect()
            gc.freeze()
            gc.disable()
            uvloop.run(_serve(job, pipe))
            gc.enable()


async def _serve(job: Job, pipe: Connection) -> None:
    client = Client(job)
    try:
        await client.prepare()
    except (LoadgenError, OSError, TimeoutError) as error:
        pipe.send(Failed(str(error) or f"no answer in {job.timeout_s:g} s"))
        return
    pipe.send(Ready())
    # Nothing is under way yet, so that the loop may wait for the word here.
    go = pipe.recv()
    if isinstance(go, Stop):
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), _told_to_stop, pipe, client)
    # uvloop makes what it watches non-blocking; the pipe's own reads and writes want it as it was.
    os.set_blocking(pipe.fileno(), True)
    beats = asyncio.create_task(_beat(pipe, client))
    recording = await client.run(go.start_s)
    loop.remove_reader(pipe.fileno())
    beats.cancel()
    pipe.send(recording)


def _told_to_stop(pipe: Connection, client: Client) -> None:
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv()
    client.stop()


async def _beat(pipe: Connection, client: Client) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        pipe.send(client.beat())


def soon_s() -> float:
    """A perf_counter at which clients that are told now can all start."""
    return perf_counter() + 0.02
