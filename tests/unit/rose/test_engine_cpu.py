"""The CPU engine keeps the contract of rose.batch: order, errors, a free loop, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch

from cuda_utils.errors import CudaError
from cuda_utils.lazy_tensor import LazyTensor
from rose.attention.base import AttentionBackend
from rose.batch import EngineInfo, RaggedBatch
from rose.cpu_engine import CpuEngine, _CpuStep
from rose.device_batch import DeviceBatch, Outputs
from rose.errors import EngineDeadError, EngineError, OutOfMemoryError, StepError
from rose.limits import StepLimits
from rose.step_errors import as_engine_error
from scheduler.batcher import Batcher
from scheduler.errors import SchedulerError, StepFailed
from scheduler.options import SchedulerOptions

DIMENSIONS = 4
INFO = EngineInfo("m", "bert", "float32", "cpu", DIMENSIONS, 100, 64, 128, 8, "mean", True, has_int8=True)
LIMITS = StepLimits(128, 8, 64, 100, 2)


class NoAttention:
    """A backend for models that attend to nothing."""

    name = "none"
    capturable = False

    def plan(self, host_cu_seqlens: np.ndarray) -> None:
        """Nothing, as on a CPU."""


class SumModel:
    """Every component of a vector is the sum of the ids; `before` runs first, on the worker's thread."""

    def __init__(self, before: Callable[[DeviceBatch], object] = lambda batch: None) -> None:
        self.before = before
        self.threads: set[str] = set()

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        self.threads.add(threading.current_thread().name)
        self.before(batch)
        offsets = batch.cu_seqlens.tolist()
        for row, (start, end) in enumerate(pairwise(offsets)):
            total = float(batch.input_ids[start:end].sum())
            if batch.token_type_ids is not None:
                total += 1000 * float(batch.token_type_ids[start:end].sum())
            outputs.vectors[row] = total
            assert outputs.int8 is not None
            outputs.int8[row] = row


def engine_of(model: SumModel) -> CpuEngine:
    return CpuEngine(cast(Any, model), cast(AttentionBackend, NoAttention()), INFO, LIMITS, num_threads=1)


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def engine(gate: threading.Event) -> Iterator[CpuEngine]:
    """Steps wait for `gate` when their first id is 99."""

    def before(batch: DeviceBatch) -> None:
        if int(batch.input_ids[0]) == 99:
            assert gate.wait(10)

    engine = engine_of(SumModel(before))
    yield engine
    gate.set()
    engine.close()


def batch_of(*sequences: list[int]) -> RaggedBatch:
    return RaggedBatch.pack([np.array(sequence, np.int32) for sequence in sequences])


def test_rows_come_in_the_batchs_order(engine: CpuEngine) -> None:
    result = engine.step(batch_of([1, 2], [3], [4, 5, 6])).result()
    assert result.vectors.tolist() == [[3.0] * 4, [3.0] * 4, [15.0] * 4]
    assert result.vectors.dtype == np.float32
    assert result.int8 is not None and result.int8.tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_token_types_reach_the_model(engine: CpuEngine) -> None:
    sequences = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    batch = RaggedBatch.pack(sequences, [np.array([0, 1], np.int32), None])
    assert engine.step(batch).result().vectors[:, 0].tolist() == [1003.0, 3.0]


async def test_awaiting_gives_the_result_to_everyone_and_again(
    engine: CpuEngine, gate: threading.Event
) -> None:
    lazy = engine.step(batch_of([99]))
    assert not lazy.done

    async def wait() -> float:
        return float((await lazy).vectors[0, 0])

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == [99.0, 99.0]
    assert await lazy is lazy.result()
    assert lazy.done


async def test_steps_run_in_the_order_of_the_calls(engine: CpuEngine, gate: threading.Event) -> None:
    finished: list[int] = []

    async def follow(number: int) -> None:
        await lazies[number]
        finished.append(number)

    lazies = [engine.step(batch_of([99 if number == 0 else number + 1])) for number in range(5)]
    tasks = [asyncio.create_task(follow(number)) for number in (4, 2, 0, 3, 1)]
    await asyncio.sleep(0)
    assert engine.stats()["in_flight"] == 5
    gate.set()
    await asyncio.gather(*tasks)
    assert finished == [0, 1, 2, 3, 4]
    assert engine.stats()["in_flight"] == 0


async def test_the_loop_turns_while_a_forward_runs(engine: CpuEngine, gate: threading.Event) -> None:
    waiter = asyncio.ensure_future(asyncio.wait_for(engine.step(batch_of([99])), 10))
    turns = 0
    while turns < 1000:
        await asyncio.sleep(0)
        turns += 1
    assert not waiter.done()
    gate.set()
    assert (await waiter).vectors[0, 0] == 99


def test_the_model_runs_on_one_thread_that_is_not_the_callers() -> None:
    model = SumModel()
    engine = engine_of(model)
    for number in range(3):
        engine.step(batch_of([number])).result()
    engine.close()
    assert model.threads == {"rose-cpu"}


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("bad shape"), StepError),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
            OutOfMemoryError,
        ),
        (MemoryError(), OutOfMemoryError),
        (torch.OutOfMemoryError("no"), OutOfMemoryError),
    ],
)
def test_a_failing_step_fails_alone(raised: Exception, expected: type[Exception]) -> None:
    def before(batch: DeviceBatch) -> None:
        if int(batch.input_ids[0]) == 13:
            raise raised

    engine = engine_of(SumModel(before))
    bad, good = engine.step(batch_of([13])), engine.step(batch_of([7]))
    with pytest.raises(expected) as first:
        bad.result()
    assert type(first.value) is expected
    assert first.value.__cause__ is raised
    with pytest.raises(expected):
        bad.result()
    assert good.result().vectors[0, 0] == 7
    assert engine.stats()["failed_steps"] == 1
    assert engine.stats()["dead"] is None
    engine.close()


@pytest.mark.parametrize("code", [2, 700])
def test_what_cuda_says_of_memory_is_no_other_error(code: int) -> None:
    expected = OutOfMemoryError if code == 2 else EngineDeadError
    assert type(as_engine_error(CudaError(code, "cudaHostAlloc"))) is expected
    raised = RuntimeError("CUDA error")
    raised.error_code = code  # type: ignore[attr-defined]  # as torch.AcceleratorError has it
    assert type(as_engine_error(raised)) is expected


def test_a_step_without_memory_for_its_result_is_counted_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory:
        def __getattr__(self, name: str) -> object:
            if name == "empty":
                raise MemoryError
            return getattr(np, name)

    engine = engine_of(SumModel(lambda batch: None))
    with monkeypatch.context() as patch:
        patch.setattr("rose.cpu_engine.np", NoMemory())
        with pytest.raises(OutOfMemoryError):
            engine.step(batch_of([1])).result()
    assert engine.step(batch_of([2])).result().vectors[0, 0] == 2
    assert (engine.stats()["failed_steps"], engine.stats()["in_flight"]) == (1, 0)
    engine.close()


@pytest.mark.parametrize("kind", [RuntimeError, StepError])
async def test_a_failed_step_leaves_nothing_for_the_collector(kind: type[Exception]) -> None:
    """What a cycle keeps of a step are its tensors, until the collector runs, which is seldom."""

    def fail(batch: DeviceBatch) -> None:
        raise kind("a bad kernel")

    def left() -> list[object]:
        kinds = EngineError | SchedulerError | LazyTensor | _CpuStep
        return [it for it in gc.get_objects() if isinstance(it, kinds)]

    engine = engine_of(SumModel(fail))
    batcher = Batcher(engine, SchedulerOptions())
    await batcher.start()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with contextlib.suppress(StepFailed):
            await batcher.run([np.array([7], np.int32)])
        assert batcher.metrics.batches_failed == 1
        await asyncio.sleep(0.01)  # the worker's thread lets go of the step
        assert left() == []
    finally:
        gc.enable()
        await batcher.close(0.0)
        engine.close()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_is_marked_and_no_other(poison: float) -> None:
    class NanModel(SumModel):
        def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
            super().forward(batch, outputs)
            outputs.vectors[-2, -1] = poison

    engine = engine_of(NanModel())
    result = engine.step(batch_of([1], [2], [3])).result()
    assert result.non_finite == (1,)
    assert (result.vectors[0, 0], result.vectors[2, 0]) == (1, 3)
    assert engine.stats()["non_finite_sequences"] == 1
    engine.close()


async def test_a_worker_that_dies_kills_the_engine_but_leaves_no_one_waiting() -> None:
    def before(batch: DeviceBatch) -> None:
        raise SystemExit(1)

    engine = engine_of(SumModel(before))
    lazies = [engine.step(batch_of([number])) for number in (1, 2)]
    for lazy in lazies:
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(lazy, 10)
    with pytest.raises(EngineDeadError):
        engine.step(batch_of([1]))
    assert "SystemExit" in str(engine.stats()["dead"])
    engine.close()


def test_close_finishes_what_was_accepted_and_then_refuses(engine: CpuEngine, gate: threading.Event) -> None:
    lazies = [engine.step(batch_of([99])), engine.step(batch_of([5]))]
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert all(lazy.done for lazy in lazies)
    assert [lazy.result().vectors[0, 0] for lazy in lazies] == [99, 5]
    with pytest.raises(EngineDeadError, match="closed"):
        engine.step(batch_of([1]))
    engine.close()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of(*[[1]] * 9), "9 sequences; a step takes 1 to 8"),
        (batch_of(*[[1] * 43] * 3), "129 tokens; a step takes 128"),
        (batch_of([1] * 65), "sequence has 65 tokens; this model takes 64"),
        (batch_of([1], []), "empty sequence"),
        (RaggedBatch(np.zeros(0, np.int32), np.zeros(1, np.int32)), "0 sequences"),
        (batch_of([5, 100]), "token id 100 is out of range; this model takes 0 to 99"),
        (batch_of([5, -1]), "token id -1 is out of range"),
        (RaggedBatch(np.ones(3, np.int32), np.array([0, 2], np.int32)), "offsets span 0..2"),
        (RaggedBatch(np.ones(2, np.int32), np.array([0, 2, 1, 2], np.int32)), "empty sequence"),
        (
            replace(batch_of([1, 2]), token_type_ids=np.array([0, 2], np.int32)),
            "token type 2 is out of range",
        ),
        (replace(batch_of([1, 2]), token_type_ids=np.zeros(1, np.int32)), "not as many token types"),
    ],
)
def test_batches_beyond_the_limits_are_refused_at_once(
    engine: CpuEngine, batch: RaggedBatch, message: str
) -> None:
    with pytest.raises(StepError, match=message):
        engine.step(batch)
    assert engine.step(batch_of([1])).result().vectors[0, 0] == 1


def test_read_only_input_is_taken_without_a_warning(
    engine: CpuEngine, recwarn: pytest.WarningsRecorder
) -> None:
    received = np.frombuffer(np.array([1, 2], np.int32).tobytes(), np.int32)
    assert engine.step(RaggedBatch(received, np.array([0, 2], np.int32))).result().vectors[0, 0] == 3
    assert not recwarn.list


def test_results_share_nothing_between_steps(engine: CpuEngine) -> None:
    first = engine.step(batch_of([1])).result()
    second = engine.step(batch_of([2])).result()
    first.vectors[:] = -1
    assert second.vectors.tolist() == [[2.0] * 4]


def test_step_returns_before_the_forward_does(engine: CpuEngine) -> None:
    started = time.perf_counter()
    lazy = engine.step(batch_of([99]))  # cannot finish: nobody opens the gate yet
    assert time.perf_counter() - started < 1
    assert not lazy.done
