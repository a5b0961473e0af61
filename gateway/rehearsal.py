"""Answers the newest request once more, for nobody, shortly before its step ends.

While a step takes its milliseconds, others have the processor's caches: the answer to 25 x 512 tokens then
took the gateway four times as long as one that it gives again and again. So all of that work is done for
nothing when the loop would only wait: the same code, in an application of its own, over a scheduler whose
engine computes nothing. So nothing is counted, logged or traced; only the ids that answers get are drawn from
one row.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from aiohttp import web

from gateway.app import create_app
from gateway.exchange import PlainRequest, PlainRoutes
from gateway.listener import prepare
from gateway.options import GatewayOptions
from rose.batch import BatchResult, EngineInfo, RaggedBatch
from rose.errors import StepError
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions

logger = logging.getLogger(__name__)

# The first rehearsal of a step finds all of it cold and takes several times as long as the second, which is
# the one that must not be late: the longer time counts for no more than so many shorter ones.
_COLD = 2
# Each time it is left out: one that took long for once is tried again, and one that always does after so
# many requests that their p99 does not show it.
_FORGET = 0.998
# Answers to more texts take too long to be given for nothing, above all as JSON: 32 of 1024 numbers 0.8 ms.
_MOST_TEXTS = 32
_BUFFER_BYTES = 1 << 18


@runtime_checkable
class NearingEngine(Protocol):
    """An engine that tells when a step's end is near, in seconds until then."""

    on_near: Callable[[float], None] | None


class RequestRehearsal:
    """An application that answers whatever request is the newest of another one's.

    served: the other one's plain routes, which keep that request.
    """

    def __init__(
        self, served: PlainRoutes, batcher: Batcher, runner: web.AppRunner, loopback: _Loopback
    ) -> None:
        self._served = served
        self._batcher = batcher
        self._runner = runner
        self._loopback = loopback
        self._nowhere = _Nowhere(self._answered, self._ended)
        self._connection = self._connected()
        self._refused: PlainRequest | None = None
        self._under_way: PlainRequest | None = None
        self._began_s = self._took_s = 0.0
        self.answers = 0
        served.keeps_newest = True

    @classmethod
    async def start(cls, options: GatewayOptions, info: EngineInfo, served: PlainRoutes) -> RequestRehearsal:
        """Of requests to the application that has `served`, with its options and its model's info.

        Raises:
            OSError: there is no loopback, or no descriptor left; nothing is started then.
        """
        loopback = await asyncio.to_thread(_Loopback)
        batcher = Batcher(_SilentEngine(info), SchedulerOptions())
        await batcher.start()
        bounded = replace(options, dashboard=False, max_items=min(options.max_items, _MOST_TEXTS))
        runner = await prepare(create_app(bounded, batcher, info, None))
        return cls(served, batcher, runner, loopback)

    def run(self, left_s: float) -> None:
        """Answer the newest request, if that takes less than the seconds that are left. Never raises.

        What can only be refused, as text without a tokenizer is, is not tried again.
        """
        request = self._served.newest
        if request is not self._refused:
            self._refused = None
        elif request is not None:
            return
        if request is None or self._under_way is not None:
            return
        if left_s < self._took_s:
            self._took_s *= _FORGET
            return
        try:
            self._answer(request)
        except Exception as error:
            self._served.keeps_newest, self._served.newest = False, None
            logger.warning("requests are not rehearsed any more: %s", error)

    def _answer(self, request: PlainRequest) -> None:
        if self._nowhere.closed:
            self._connection.connection_lost(None)
            self._connection = self._connected()
        self._under_way, self._began_s = request, time.perf_counter()
        data = request.head + request.body
        self._loopback.carry(len(data))
        self._connection.data_received(data)

    async def close(self) -> None:
        """End it; the other application is as it was."""
        self._served.keeps_newest, self._served.newest = False, None
        await self._batcher.close(0.0)
        await self._runner.cleanup()
        self._loopback.close()

    def _connected(self) -> asyncio.Protocol:
        if self._runner.server is None:
            raise RuntimeError("the application is not set up")
        connection = self._runner.server()
        self._nowhere.closed = False
        connection.connection_made(self._nowhere)
        return connection

    def _answered(self, answer: bytes) -> None:
        """The whole answer, or its beginning."""
        self._loopback.carry(len(answer))
        if self._under_way is None:
            return
        took_s = time.perf_counter() - self._began_s
        self._took_s = min(took_s, _COLD * self._took_s or took_s)
        if not answer.startswith(b"HTTP/1.1 200 "):
            self._refused = self._under_way
        self._under_way = None
        self.answers += 1

    def _ended(self) -> None:
        """The connection, whatever of an answer it has seen."""
        self._under_way = None


class _Nowhere(asyncio.Transport):
    """Where answers go. closed: the connection to it has ended, as idle ones do."""

    def __init__(self, written: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        super().__init__()
        self._written = written
        self._ended = ended
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """An answer, or a part of it."""
        self._written(bytes(data))

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def close(self) -> None:
        """Not to be used any more."""
        self.closed = True
        self._ended()

    def abort(self) -> None:
        """The same."""
        self.close()

    def get_write_buffer_size(self) -> int:
        """All is gone at once."""
        return 0

    def pause_reading(self) -> None:
        """There is nothing to pause."""

    def resume_reading(self) -> None:
        """There is nothing to resume."""


class _Loopback:
    """Both ends of a TCP connection: what the kernel does for one grows cold as well. It carries zeros."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._here = socket.create_connection(listening.getsockname())
            self._there, _ = listening.accept()
        for end in (self._here, self._there):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._zeros, self._taken = memoryview(bytes(_BUFFER_BYTES)), bytearray(_BUFFER_BYTES)

    def carry(self, nbytes: int) -> None:
        """Send so many and take them, or as many as go without a wait."""
        with suppress(OSError):
            self._here.send(self._zeros[:nbytes])
            while self._there.recv_into(self._taken):
                pass

    def close(self) -> None:
        """Both ends."""
        self._here.close()
        self._there.close()


class _Known:
    """A result that is there. result: what it is."""

    done = True

    def __init__(self, result: BatchResult) -> None:
        self._result = result

    def result(self) -> BatchResult:
        """See rose.batch.LazyTensor."""
        return self._result

    def __await__(self) -> Generator[object, None, BatchResult]:
        """See rose.batch.LazyTensor."""
        return self._result
        yield  # a generator, as awaitables are


class _SilentEngine:
    """Gives ones for every row, at once."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        shape = (info.max_batch_seqs, info.dimensions)
        self._ones = BatchResult(
            np.ones(shape, np.float32),
            np.ones(shape, np.int8) if info.has_int8 else None,
            squares=np.full(shape[0], info.dimensions, np.float32),
        )

    @property
    def info(self) -> EngineInfo:
        """See rose.batch.Engine."""
        return self._info

    def step(self, batch: RaggedBatch) -> _Known:
        """See rose.batch.Engine."""
        if batch.token_outputs or batch.num_rows > len(self._ones.vectors):
            raise StepError("this is not rehearsed")
        return _Known(self._ones.rows(0, batch.num_rows))

    def stats(self) -> Mapping[str, object]:
        """See rose.batch.Engine."""
        return {}

    def close(self) -> None:
        """See rose.batch.Engine."""
