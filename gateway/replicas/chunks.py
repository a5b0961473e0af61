"""A job cut into pieces that replicas take, and those that wait. Each change is one synchronous call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from gateway.replicas.replica import Replica
from rose.batch import BatchResult, EngineInfo, TokenOutput
from scheduler.job import Job, Run, RunCounts

# Tokens of a chunk. From some 4000 on a GPU gains nothing by more, and a chunk costs the gateway half a
# millisecond; fewer than LEAST are not worth another replica's while.
MOST_TOKENS, LEAST_TOKENS = 4096, 1024
MOST_ROWS = 256
# Chunks of ended jobs stay in the deque until they outnumber the live ones by so many; then one pass
# removes them.
_MOST_DEAD = 256


@dataclass(slots=True, eq=False)
class Chunk:
    """A run of a job's sequences.

    tried: replicas that failed with it. attempts: how often a replica may have begun with it.
    context: of the request, in which `task` runs: a trace goes on there.
    task, replica: what awaits it, and where it is, while it is under way. taken_back: why that was ended.
    """

    run: Run
    tried: set[Replica] = field(default_factory=set)
    attempts: int = 0
    task: asyncio.Task[BatchResult] | None = None
    replica: Replica | None = None
    taken_back: str = ""
    context: Context = field(default_factory=copy_context)

    @property
    def job(self) -> Job:
        """Whose sequences they are."""
        return self.run.job

    @property
    def num_seqs(self) -> int:
        """How many sequences it has."""
        return self.run.num_seqs

    @property
    def num_tokens(self) -> int:
        """How many tokens these have."""
        return self.run.num_tokens


def split(job: Job, max_tokens: int, max_rows: int) -> Iterator[Chunk]:
    """Chunks of up to so many, or of one sequence that has more."""
    start, stop = 0, len(job.sequences)
    while start < stop:
        end = max(start + 1, Run(job, start, stop).fitting(max_tokens, max_rows))
        yield Chunk(Run(job, start, end))
        start = end


def chunk_limits(
    num_tokens: int, num_replicas: int, kinds: frozenset[TokenOutput], info: EngineInfo
) -> tuple[int, int]:
    """Tokens and rows of a chunk of a job of `num_tokens`: all replicas have a part of a large one."""
    share = -(-num_tokens // max(1, num_replicas))
    tokens = min(MOST_TOKENS, max(LEAST_TOKENS, share))
    return min(tokens, info.most_tokens(kinds)), min(MOST_ROWS, info.max_batch_seqs)


class ChunkQueue(RunCounts):
    """Chunks that wait, first come, first served; those that failed somewhere before all others."""

    def __init__(self) -> None:
        super().__init__()
        self._again: deque[Chunk] = deque()
        self._waiting: deque[Chunk] = deque()

    def append(self, chunk: Chunk) -> None:
        """A new one, at the end."""
        self._waiting.append(chunk)
        self.came(chunk.run)

    def again(self, chunk: Chunk) -> None:
        """One that comes back."""
        self._again.append(chunk)
        self.came(chunk.run)

    def take(self, place: Callable[[Chunk], Replica | None]) -> tuple[Chunk, Replica] | None:
        """The first chunk for which `place` has a replica: of those that came back, or the next new one."""
        for index, chunk in enumerate(self._again):
            if not chunk.job.done and (replica := place(chunk)) is not None:
                del self._again[index]
                self.went(chunk.run)
                return chunk, replica
        while self._waiting:
            chunk = self._waiting[0]
            if chunk.job.done:  # dropped; counted no longer
                self._waiting.popleft()
                continue
            replica = place(chunk)
            if replica is None:
                return None
            self._waiting.popleft()
            self.went(chunk.run)
            return chunk, replica
        return None

    def drop(self, job: Job) -> None:
        """Forget what waits of `job`, which has ended. May be called again."""
        if not self.forget(job):
            return
        self._again = deque(chunk for chunk in self._again if not chunk.job.done)
        if len(self._waiting) > 2 * self.num_seqs + _MOST_DEAD:
            self._waiting = deque(chunk for chunk in self._waiting if not chunk.job.done)

    def __repr__(self) -> str:
        return (
            f"<ChunkQueue {self.num_seqs} seqs, {self.num_tokens} tokens waiting, {len(self._again)} again>"
        )
