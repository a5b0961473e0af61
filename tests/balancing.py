"""What tests of the balancer share: replicas that are scripts, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from gateway.balancer import Balancer
from gateway.replicas.chunks import Chunk
from gateway.replicas.pace import ChunkTimes
from gateway.replicas.replica import Replica
from rose.batch import BatchResult, EngineInfo, Int32, RaggedBatch
from scheduler.options import SchedulerOptions
from tests.fakes import fake_info, fake_tokens, fake_vectors
from tests.scheduling import assert_answers, sequence
from tests.virtual_loop import run_virtual

INFO = fake_info(max_batch_tokens=4096, max_batch_seqs=64)
S_A_TOKEN = 1e-5


class Remote:
    """The far end of one replica: runs one chunk after another, and fails as its script says.

    script: what happens to the next chunks: an error, None (rows), or "hang". took: what it was sent.
    """

    def __init__(self, replica: Replica, s_a_token: float = S_A_TOKEN, info: EngineInfo = INFO) -> None:
        self.replica = replica
        self.s_a_token = s_a_token
        self.script: deque[Exception | str | None] = deque()
        self.took: list[Chunk] = []
        self.left_s: list[float | None] = []
        self.cancelled = 0
        self.most_outstanding = 0
        self._info = info
        self._free_s = 0.0

    @property
    def tokens(self) -> int:
        """Of all chunks that it was sent."""
        return sum(chunk.num_tokens for chunk in self.took)

    async def run(self, chunk: Chunk, left_s: float | None) -> BatchResult:
        self.took.append(chunk)
        self.left_s.append(left_s)
        self.most_outstanding = max(self.most_outstanding, self.replica.outstanding_tokens)
        step = self.script.popleft() if self.script else None
        loop = asyncio.get_running_loop()
        try:
            if step == "hang":
                await asyncio.sleep(3600)
            self._free_s = max(self._free_s, loop.time()) + self.s_a_token * chunk.num_tokens + 1e-4
            await asyncio.sleep(self._free_s - loop.time())
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(step, Exception):
            raise step
        return rows(chunk, self._info)


def rows(chunk: Chunk, info: EngineInfo = INFO) -> BatchResult:
    """What an engine gives for `chunk`."""
    run, kinds = chunk.run, chunk.job.token_outputs
    batch = RaggedBatch.pack(run.sequences, run.token_type_ids, run.spans, kinds)
    tokens = {kind: fake_tokens(batch, kind, info.token_outputs[kind]) for kind in kinds}
    return BatchResult(fake_vectors(batch, info.dimensions), tokens=tokens)


class Bench:
    """A balancer over `count` such replicas, all in service. remotes: by their number."""

    def __init__(self, count: int, *, info: EngineInfo = INFO, seed: int = 0, **options: Any) -> None:
        clock: Callable[[], float] = asyncio.get_running_loop().time
        times = ChunkTimes()
        self.balancer = Balancer(
            info, SchedulerOptions(**options), self._send, clock=clock, rng=random.Random(seed)
        )
        for number in range(count):
            replica = Replica(f"r{number}", times, lambda _: self.balancer.changed(), clock)
            self.balancer.replicas.append(replica)
            replica.admit(0.0)
        self.remotes = [Remote(replica, info=info) for replica in self.balancer.replicas]

    @property
    def replicas(self) -> list[Replica]:
        return self.balancer.replicas

    def assert_idle(self) -> None:
        """Nothing is counted that is not there."""
        assert [(r.outstanding_chunks, r.outstanding_tokens) for r in self.replicas] == [(0, 0)] * len(
            self.replicas
        )
        metrics = self.balancer.metrics
        assert (metrics.waiting_seqs, metrics.waiting_tokens, metrics.running_batches) == (0, 0, 0)

    async def _send(self, replica: Replica, chunk: Chunk, left_s: float | None) -> BatchResult:
        return await next(r for r in self.remotes if r.replica is replica).run(chunk, left_s)


Scenario = Callable[..., Coroutine[Any, Any, None]]


def virtual(scenario: Scenario) -> Callable[..., None]:
    """Run a test in virtual time."""

    @wraps(scenario)
    def test(*args: Any, **kwargs: Any) -> None:
        run_virtual(scenario(*args, **kwargs))

    return test


def sequences(count: int, length: int = 10, first: int = 0) -> list[Int32]:
    return [sequence(length, first=first + 20 * index) for index in range(count)]


async def ask(bench: Bench, *jobs: list[Int32], **settings: Any) -> list[Any]:
    """Results, each checked, or errors."""

    async def one(job: list[Int32]) -> None:
        assert_answers(await bench.balancer.run(job, **settings), job)

    return await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True)
