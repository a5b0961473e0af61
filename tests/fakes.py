"""A scripted engine: keeps the contract of `rose.batch`, runs no model, and fails when told to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

import numpy as np

from rose.batch import BatchResult, EngineInfo, Float32, Int32, RaggedBatch, TokenOutput
from rose.errors import EngineDeadError, EngineError, OutOfMemoryError


def fake_info(
    *,
    dimensions: int = 8,
    max_batch_tokens: int = 4096,
    max_batch_seqs: int = 64,
    has_int8: bool = False,
    token_outputs: Mapping[TokenOutput, int] | None = None,
    whole_job_tokens: int = 0,
) -> EngineInfo:
    """An EngineInfo with the limits that tests care about."""
    return EngineInfo(
        model="fake",
        architecture="fake",
        dtype="float32",
        device="cpu",
        dimensions=dimensions,
        vocab_size=30_000,
        max_model_len=min(512, max_batch_tokens),
        max_batch_tokens=max_batch_tokens,
        max_batch_seqs=max_batch_seqs,
        pooling="mean",
        normalize=True,
        has_int8=has_int8,
        attention=("fake",),
        token_outputs=token_outputs or {},
        unweighted_ids=(0, 1, 256, 257),
        whole_job_tokens=whole_job_tokens,
    )


def fake_vectors(batch: RaggedBatch, dimensions: int) -> Float32:
    """f32[R, D] in [-1, 1): a hash of a sequence's or span's ids, their places in the sequence and types."""
    position = np.arange(batch.num_tokens) - np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
    ids = batch.input_ids.astype(np.uint64) + np.uint64(1)
    if batch.token_type_ids is not None:
        ids += batch.token_type_ids.astype(np.uint64) * np.uint64(1_000_003)
    weighted = ids * (2 * position.astype(np.uint64) + np.uint64(1)) * np.uint64(2_654_435_761)
    running = np.append(np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64))
    starts, ends = (batch.cu_seqlens[:-1], batch.cu_seqlens[1:]) if batch.spans is None else batch.spans.T
    sums = running[ends] - running[starts]
    odd = 2 * np.arange(dimensions, dtype=np.uint64) + np.uint64(1)
    mixed = (sums[:, None] * odd * np.uint64(6_364_136_223_846_793_005)) >> np.uint64(40)
    vectors: Float32 = mixed.astype(np.float32) / np.float32(2**23) - np.float32(1)
    return vectors


def fake_vector(input_ids: Int32 | list[int], dimensions: int = 8) -> Float32:
    """f32[D]: what FakeEngine answers for one sequence without types, alone or in any batch."""
    vector: Float32 = fake_vectors(RaggedBatch.pack([np.asarray(input_ids, np.int32)]), dimensions)[0]
    return vector


def fake_tokens(batch: RaggedBatch, kind: TokenOutput, width: int) -> Float32:
    """f32[T, width]: a hash of a token's id, place and type; many lexical weights are 0."""
    places = np.arange(batch.num_tokens + 1, dtype=np.int32)
    values = fake_vectors(replace(batch, spans=np.stack([places[:-1], places[1:]], axis=1)), width)
    if kind == "lexical":
        values = np.maximum(values, 0)
    if kind == "multi_vector":
        values = values / np.linalg.norm(values, axis=1, keepdims=True)
    return values


class FakeLazyTensor:
    """The result of one scripted step; the engine settles it, once."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.batch = batch
        self._outcome: BatchResult | EngineError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def result(self) -> BatchResult:
        if self._outcome is None:
            raise RuntimeError("a fake step that is not done would block for ever")
        if isinstance(self._outcome, EngineError):
            raise self._outcome
        return self._outcome

    def settle(self, outcome: BatchResult | EngineError) -> None:
        """Finish or fail; what is settled stays as it is."""
        if self._outcome is None:
            self._outcome = outcome
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def __await__(self) -> Generator[object, None, BatchResult]:
        if self._outcome is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            yield from waiter
        return self.result()


class FakeEngine:
    """Runs steps one after another, as its script says.

    service_s: seconds a step takes, or a function of the batch, on the running loop's timers (virtual time
        works); 0.0 finishes inside `step`; None finishes nothing until `finish` is called.
    capture_freely: as the real engine's; `captures` keeps what it was at each step.
    oom_above_seqs: steps of more sequences end in OutOfMemoryError.
    batches: every batch that was launched, in order. in_flight_at_launch: how many ran or waited before it.
    """

    def __init__(
        self,
        *,
        info: EngineInfo | None = None,
        service_s: float | Callable[[RaggedBatch], float] | None = 0.0,
        oom_above_seqs: int | None = None,
    ) -> None:
        self._info = info if info is not None else fake_info()
        self._service_s = service_s
        self.oom_above_seqs = oom_above_seqs
        self.capture_freely = True
        self.captures: list[bool] = []
        self.batches: list[RaggedBatch] = []
        self.closed = False
        self.running: deque[FakeLazyTensor] = deque()
        self.in_flight_at_launch: list[int] = []
        self._dead: str | None = None
        self._launch_errors: deque[Exception] = deque()
        self._outcomes: deque[BatchResult | EngineError | None] = deque()
        self._hangs = 0
        self._free_at = 0.0
        self._due: set[FakeLazyTensor] = set()

    @property
    def most_in_flight(self) -> int:
        """The most steps that were launched and not finished at one time."""
        return 1 + max(self.in_flight_at_launch, default=-1)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def raise_next(self, error: Exception) -> None:
        """`step` itself raises `error`, once."""
        self._launch_errors.append(error)

    def fail_next(self, error: EngineError | None) -> None:
        """The next unscripted step ends in `error` (None: as usual)."""
        self._outcomes.append(error)

    def answer_next(self, result: BatchResult) -> None:
        """The next unscripted step gives `result`, whatever its batch asked for."""
        self._outcomes.append(result)

    def hang_next(self, steps: int = 1) -> None:
        """The next `steps` steps never finish by themselves."""
        self._hangs += steps

    def die(self, reason: str = "the fake device is gone") -> None:
        """Fail what runs and refuse every later step, as after a sticky device error."""
        self._dead = reason
        self._due.clear()
        while self.running:
            self.running.popleft().settle(EngineDeadError(reason))

    def finish(self, steps: int = 1) -> None:
        """Settle the oldest `steps` steps now, in order, as the script says."""
        for _ in range(steps):
            lazy = self.running.popleft()
            self._due.discard(lazy)
            lazy.settle(self._outcome(lazy.batch))

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._launch_errors:
            raise self._launch_errors.popleft()
        lazy = FakeLazyTensor(batch)
        self.batches.append(batch)
        self.captures.append(self.capture_freely)
        self.in_flight_at_launch.append(len(self.running))
        self.running.append(lazy)
        if self._hangs:
            self._hangs -= 1
        elif self._service_s is not None:
            self._schedule(lazy)
        return lazy

    def stats(self) -> Mapping[str, object]:
        return {"steps": len(self.batches)}

    def close(self) -> None:
        self.closed = True
        self.die("the fake engine is closed")

    def _schedule(self, lazy: FakeLazyTensor) -> None:
        service_s = self._service_s(lazy.batch) if callable(self._service_s) else self._service_s
        if not service_s:
            self._finish_up_to(lazy)
            return
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + service_s
        loop.call_at(self._free_at, self._finish_up_to, lazy)

    def _finish_up_to(self, lazy: FakeLazyTensor) -> None:
        """Finish `lazy` once every earlier step is, and unless one hangs: steps run one after another.

        Timers of a loop that is late fire in another order than their steps were launched in.
        """
        self._due.add(lazy)
        while self.running and self.running[0] in self._due:
            self.finish()

    def _outcome(self, batch: RaggedBatch) -> BatchResult | EngineError:
        scripted = self._outcomes.popleft() if self._outcomes else None
        if scripted is not None:
            return scripted
        if self.oom_above_seqs is not None and batch.num_seqs > self.oom_above_seqs:
            return OutOfMemoryError(f"{batch.num_seqs} sequences do not fit")
        vectors = fake_vectors(batch, self._info.dimensions)
        int8 = np.rint(np.tanh(vectors) * 127).astype(np.int8) if self._info.has_int8 else None
        widths = self._info.token_outputs
        tokens = {kind: fake_tokens(batch, kind, widths[kind]) for kind in batch.token_outputs}
        with np.errstate(all="ignore"):
            squares = np.vecdot(vectors, vectors)
        return BatchResult(vectors, int8, squares=squares, tokens=tokens)
