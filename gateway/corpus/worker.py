"""One engine's worker: shards in, committed shards out. The same in one process and in a Ray actor.

One shard is read at a time, and tokenised while the device works on what was read before; when all of a shard
is read the next one begins, so that the device does not run dry between them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from gateway.corpus.commits import Outcome, commit, data_files, outcome_of, part_name
from gateway.corpus.embedder import Embedder
from gateway.corpus.errors import CorpusError
from gateway.corpus.gate import Gate
from gateway.corpus.inputs import read_pieces, source_filesystem
from gateway.corpus.job import check_engine
from gateway.corpus.options import CorpusOptions, LoadedModel
from gateway.corpus.parts import PartWriter, opener_of, part_schema, writing
from gateway.corpus.plan import Shard
from gateway.corpus.qdrant import Qdrant
from gateway.corpus.rows import Chunk, Columns
from gateway.corpus.store import Store
from gateway.corpus.windows import Window, next_window
from gateway.tokenization.pool import TokenizerPool
from rose.batch import Engine
from scheduler.batcher import Batcher
from scheduler.options import SchedulerOptions
from scheduler.warmup import measure, warm_up

T = TypeVar("T")

# Budgets of a batch that may wait for the device: two run, two more are ready.
_BATCHES_AHEAD = 4


class Progress:
    """Called on the worker's loop whenever rows are embedded or rejected; counts what goes on."""

    def __init__(self, tell: Callable[[int, int], None] = lambda rows, tokens: None) -> None:
        """tell: rows, rejected ones too, and tokens."""
        self.tell = tell
        self.held_rows = self.most_held_rows = 0

    def hold(self, rows: int) -> None:
        """So many more, or fewer, rows are in memory."""
        self.held_rows += rows
        self.most_held_rows = max(self.most_held_rows, self.held_rows)


class ShardWorker:
    """Embeds shards on the running loop. id_type: of OUT's ids; None: there are none."""

    def __init__(
        self, options: CorpusOptions, model: LoadedModel, id_type: Any, run: str, progress: Progress
    ) -> None:
        self._options = options
        self._model = model
        self._id_type = id_type
        self._run = run
        self._progress = progress
        self._store, self._opener = Store(options.out), opener_of(options)
        self._inputs = source_filesystem(options.source)
        self._columns = Columns(options.text_column, options.id_column)
        self._tokenizer = TokenizerPool(model.tokenizer, options.tokenizer_threads, inline_chars=0)
        self._reading = asyncio.Lock()
        self._slots = asyncio.Semaphore(options.windows)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="corpus-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="corpus-writer")
        self._batcher: Batcher | None = None
        self._qdrant: Qdrant | None = None

    async def start(self) -> None:
        """Time the engine's steps and run a first one.

        Raises:
            CorpusError: the model does not do what is asked for, or Qdrant does not.
            scheduler.errors.SchedulerError, rose.errors.EngineError: a first step failed.
        """
        engine, scheduler = self._model.engine, self._model.scheduler
        await self._in_writer(check_engine, self._store, engine.info)
        batcher = Batcher(engine, await _timed(engine, scheduler))
        await batcher.start()
        self._batcher = batcher
        tokens = _BATCHES_AHEAD * min(scheduler.max_budget_tokens, engine.info.max_batch_tokens)
        gate = Gate(tokens)
        self._embedder = Embedder(
            self._options, engine.info, self._tokenizer, batcher, gate, self._progress.tell
        )
        about = {"model": engine.info.model, "weights": self._model.digest, "prompt": self._embedder.prompt}
        dimensions = self._embedder.dimensions
        self._schema = part_schema(self._options, dimensions, self._id_type, about)
        if self._options.qdrant is not None:
            self._qdrant = Qdrant(self._options.qdrant)
            await self._qdrant.prepare(dimensions, self._options.vectors)
        await warm_up(batcher, engine.info)

    async def close(self) -> None:
        """End the threads and the engine, also after a start that failed."""
        if self._batcher is not None:
            await self._batcher.close(0.0)
        if self._qdrant is not None:
            await self._qdrant.close()
        for pool in (self._reader, self._writer):
            pool.shutdown(cancel_futures=True)
        self._tokenizer.close()
        self._model.engine.close()

    async def run(self, shard: Shard) -> Outcome:
        """Embed and commit `shard`, unless this run has; it may be called for two shards at once.

        Raises:
            OutputError: OUT cannot be written.
            CorpusError: the worker's own count of rows is not the plan's.
            scheduler.errors.EngineDead: the engine can run no further step.
        """
        before = await self._in_writer(outcome_of, self._store, shard)
        if before is not None and before.run == self._run:
            return before
        started_s = time.perf_counter()
        with ExitStack() as stack:
            opened = writing(self._store, shard, self._schema, self._opener)
            part = await self._in_writer(stack.enter_context, opened)
            await self._embed(shard, part)
            if part.rows + len(part.rejected) != shard.rows:
                raise CorpusError(
                    f"shard {shard.index} has {shard.rows} rows, but {part.rows} were embedded and"
                    f" {len(part.rejected)} rejected"
                )
            return await self._in_writer(self._commit, shard, part, stack, started_s)

    def _commit(self, shard: Shard, part: PartWriter, stack: ExitStack, started_s: float) -> Outcome:
        stack.close()
        outcome = Outcome(
            shard=shard.index,
            rows=part.rows,
            rejected=len(part.rejected),
            tokens=part.tokens,
            nbytes=sum(data_files(part.fragments).values()) or self._store.size(part_name(shard)),
            seconds=round(time.perf_counter() - started_s, 3),
            run=self._run,
            worker=f"{socket.gethostname()}:{os.getpid()}",
            damage=part.damage,
            fragments=part.fragments,
        )
        commit(self._store, shard, outcome)
        return outcome

    async def _embed(self, shard: Shard, part: PartWriter) -> None:
        """Read, embed and write the shard's windows, each step beside the others."""
        part.damage = next((piece.damage for piece in shard.pieces if piece.damage), "")
        embedding: asyncio.Queue[asyncio.Task[Window] | None] = asyncio.Queue()
        async with first_error(), asyncio.TaskGroup() as group:
            group.create_task(self._write(embedding, part))
            async with self._reading:
                chunks = read_pieces(self._inputs, shard.pieces, self._columns)
                while (window := await self._next(chunks)) is not None:
                    embedding.put_nowait(group.create_task(self._embedder.embed(window)))
            embedding.put_nowait(None)

    async def _next(self, chunks: Iterator[Chunk]) -> Window | None:
        """The next window, once there is room for one."""
        await self._slots.acquire()
        options = self._options
        window = await asyncio.get_running_loop().run_in_executor(
            self._reader, next_window, chunks, options.window_rows, options.window_bytes
        )
        if window is None:
            self._slots.release()
        else:
            self._progress.hold(window.size)
        return window

    async def _write(self, embedding: asyncio.Queue[asyncio.Task[Window] | None], part: PartWriter) -> None:
        """Write windows in their order, and make room for others."""
        while (task := await embedding.get()) is not None:
            window = await task
            await self._in_writer(part.write_window, window)
            if self._qdrant is not None:
                await self._qdrant.upsert(window)
            self._progress.hold(-window.size)
            self._slots.release()

    async def _in_writer(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run blocking `work` to its end, also if the caller is cancelled: no file is left half committed."""
        future = asyncio.get_running_loop().run_in_executor(self._writer, work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Of the errors that a task group gathers only the first: the others follow from it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def _timed(engine: Engine, options: SchedulerOptions) -> SchedulerOptions:
    """With the times of a device's steps, so that batches are large from the first one on."""
    if not engine.info.device.startswith("cuda"):
        return options
    try:
        async with asyncio.timeout(options.step_timeout_s):
            return replace(options, cost_points=await measure(engine, options.max_budget_tokens))
    except TimeoutError as error:
        raise CorpusError(f"the model's first steps did not end in {options.step_timeout_s:g} s") from error
