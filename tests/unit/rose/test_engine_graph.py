"""The engine of devices with graphs, on a simulated one: a thread that does copies and forwards later.

The simulated device reads a staging slot when its stream gets to the copy, not when it is launched, so a slot
refilled too early, or an output overwritten too early, shows as a wrong vector.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cuda_utils.errors import CudaError, DeviceError
from cuda_utils.event import CpuEvent
from cuda_utils.pinned import PlainHostAllocator
from cuda_utils.stream import CpuStream
from rose.batch import EngineInfo, Float32, RaggedBatch
from rose.buckets import sequence_bucket, token_bucket
from rose.engine_options import EngineOptions
from rose.errors import EngineDeadError, OutOfMemoryError, StepError
from rose.graph_device import DeviceNouns
from rose.graph_engine import GraphEngine
from rose.graph_runner import CaptureError, GraphKey
from rose.limits import StepLimits
from rose.staging import StagingLayout, StagingSlot

DIMENSIONS = 4
INFO = EngineInfo("m", "bert", "float32", "sim", DIMENSIONS, 1000, 128, 512, 16, "mean", True, has_int8=True)
LIMITS = StepLimits(512, 16, 128, 1000, 2, has_spans=True)
OPTIONS = EngineOptions(max_in_flight=3, max_capture_tokens=256, max_pinned_bytes=1 << 20)
BROKEN = CudaError(700, "cudaMemcpyAsync to the device")
REFUSED = CudaError(701, "cudaGraphLaunch")


class Simulation:
    """One stream, its memory, and a model whose vectors are [sum, length, first id, sum of types].

    pause() stops the stream until resume(). fails: raised by the next call of that name.
    """

    def __init__(self, info: EngineInfo = INFO) -> None:
        self.info = info
        self.layout = StagingLayout(token_bucket(512), sequence_bucket(16), has_types=True)
        self.input = np.full(self.layout.capacity, -7, np.int32)
        self.output = np.zeros(self.output_bytes(self.layout.max_seqs), np.uint8)
        self.input_ptr, self.output_ptr = self.input.ctypes.data, self.output.ctypes.data
        self.stream = CpuStream("simulated-device")
        self.allocator = PlainHostAllocator()
        self.gate = threading.Event()
        self.gate.set()
        self.launches = 0
        self.eager: list[GraphKey] = []
        self.captured: list[GraphKey] = []
        self.replayed: list[GraphKey] = []
        self.plans: list[tuple[int, list[int]]] = []
        self.fails: dict[str, Exception] = {}
        self.poison = 0.0
        self.dirty = False
        self.bound: list[int] = []
        self.nouns = DeviceNouns(
            memcpy=self,
            allocator=self.allocator,
            new_event=lambda: CpuEvent(self.stream),
            synchronize=self.stream.synchronize,
            bind_thread=lambda: self.bound.append(threading.get_ident()),
        )

    def engine(self, options: EngineOptions = OPTIONS) -> GraphEngine:
        return GraphEngine(self, self.nouns, self.info, LIMITS, options)

    def pause(self) -> None:
        self.gate.clear()
        self.stream.launch(lambda: self.gate.wait(20) or None)

    def resume(self) -> None:
        self.gate.set()

    # Memcpy
    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        self._fail("host_to_device")
        self.stream.launch(lambda: ctypes.memmove(destination, source, nbytes) or None)

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        self._fail("device_to_host")
        self.stream.launch(lambda: ctypes.memmove(destination, source, nbytes) or None)

    # Forward
    def output_bytes(self, num_seqs: int) -> int:
        return num_seqs * DIMENSIONS * (5 if self.info.has_int8 else 4)

    def key_of(self, num_tokens: int, num_seqs: int) -> GraphKey:
        return GraphKey(num_tokens, num_seqs, "sim")

    def plan(self, key: GraphKey, work: StagingSlot) -> None:
        self._fail("plan")
        self.plans.append((work.index, work.host_cu_seqlens(key.num_seqs).tolist()))

    def memory(self) -> Mapping[str, int]:
        return {"tensor_bytes": self.input.nbytes + self.output.nbytes}

    def destroy_retired(self, done_launches: int) -> None:
        assert done_launches <= self.launches

    def capturable(self, key: GraphKey) -> bool:
        return True

    def run(self, key: GraphKey, work: StagingSlot) -> None:
        self._fail("run")
        self.eager.append(key)
        self._enqueue(key)

    def capture(self, key: GraphKey, work: StagingSlot) -> SimulatedGraph:
        self._fail("capture")
        self.captured.append(key)
        return SimulatedGraph(self, key)

    def _enqueue(self, key: GraphKey) -> None:
        self.launches += 1
        self.stream.launch(lambda: self._compute(key))

    def _compute(self, key: GraphKey) -> None:
        num_tokens, num_seqs, _, has_spans = key
        offsets = self.input[: num_seqs + 1].tolist()
        ids = self.input[self.layout.ids_at :][:num_tokens]
        types = self.input[self.layout.types_at(num_tokens) :][:num_tokens]
        assert not ids[offsets[-1] :].any()
        rows = np.zeros((num_seqs, DIMENSIONS), np.float32)
        bounds = list(pairwise(offsets))
        if has_spans:
            spans = self.input[self.layout.size(num_tokens) :][: 2 * num_seqs].reshape(2, num_seqs)
            bounds = spans.T.tolist()
        for row, (start, end) in enumerate(bounds):
            if end > start:
                rows[row] = ids[start:end].sum(), end - start, ids[start], types[start:end].sum()
        if len(ids) == offsets[-1] == 512:
            self.dirty = False  # every row was overwritten
        rows += self.poison
        self.dirty = self.dirty or self.poison != 0.0
        if self.dirty:
            rows[:] = np.nan  # as 0 * NaN of padded rows is
        vector_bytes = rows.nbytes
        self.output[:vector_bytes] = np.frombuffer(rows.tobytes(), np.uint8)
        if self.info.has_int8:
            int8 = (np.nan_to_num(rows) % 100).astype(np.int8)
            self.output[vector_bytes : vector_bytes + int8.size] = int8.ravel().view(np.uint8)

    def _fail(self, call: str) -> None:
        error = self.fails.pop(call, None)
        if error is not None:
            raise error


class SimulatedGraph:
    nbytes = 1000

    def __init__(self, simulation: Simulation, key: GraphKey) -> None:
        self._simulation = simulation
        self._key = key

    def launch(self) -> None:
        self._simulation._fail("launch")
        self._simulation.replayed.append(self._key)
        self._simulation._enqueue(self._key)

    def close(self) -> None:
        pass


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulation = Simulation()
    yield simulation
    simulation.resume()
    simulation.stream.close()


@pytest.fixture
def engine(simulation: Simulation) -> GraphEngine:
    return simulation.engine()


def batch_of(*sequences: list[int]) -> RaggedBatch:
    return RaggedBatch.pack([np.array(sequence, np.int32) for sequence in sequences])


def expected(batch: RaggedBatch) -> Float32:
    types = batch.token_type_ids if batch.token_type_ids is not None else np.zeros_like(batch.input_ids)
    bounds = list(pairwise(batch.cu_seqlens.tolist())) if batch.spans is None else batch.spans.tolist()
    rows = [
        (batch.input_ids[start:end].sum(), end - start, batch.input_ids[start], types[start:end].sum())
        for start, end in bounds
    ]
    return np.array(rows, np.float32)


def random_batch(rng: np.random.Generator) -> RaggedBatch:
    lengths = rng.integers(1, 32, rng.integers(1, 17))
    sequences = [rng.integers(0, 1000, length, dtype=np.int32) for length in lengths]
    types = [rng.integers(0, 2, length, dtype=np.int32) for length in lengths]
    spans: list[np.ndarray | None] | None = None
    if rng.random() < 0.3:  # of the first sequence several, of the others none or one
        starts = rng.integers(0, lengths[0], 17 - len(lengths))
        parts = np.stack([starts, rng.integers(starts + 1, lengths[0] + 1)], axis=1).astype(np.int32)
        spans = [parts, *[None] * (len(lengths) - 1)]
    return RaggedBatch.pack(sequences, types if rng.random() < 0.5 else None, spans)


def test_random_batches_with_three_in_flight_all_come_back_right(engine: GraphEngine) -> None:
    rng = np.random.default_rng(0)
    running = []
    for _ in range(600):
        batch = random_batch(rng)
        running.append((batch, engine.step(batch)))
        if len(running) == 3:
            check(*running.pop(0))
    for batch, lazy in running:
        check(batch, lazy)


def check(batch: RaggedBatch, lazy: object) -> None:
    result = lazy.result()  # type: ignore[attr-defined]
    assert result.vectors.tolist() == expected(batch).tolist()
    assert result.int8.tolist() == (expected(batch) % 100).astype(np.int8).tolist()


def test_nothing_staged_is_touched_while_the_device_has_not_read_it(
    simulation: Simulation, engine: GraphEngine
) -> None:
    simulation.pause()
    batches = [batch_of([number] * 3, [number + 1]) for number in (10, 20, 30)]
    lazies = [engine.step(batch) for batch in batches]
    for _ in range(3):
        with pytest.raises(StepError, match="3 steps are in flight"):
            engine.step(batch_of([99]))
    assert not any(lazy.done for lazy in lazies)
    assert engine.stats()["in_flight"] == 3
    simulation.resume()
    for batch, lazy in zip(batches, lazies, strict=True):
        check(batch, lazy)
    check(batch_of([99]), engine.step(batch_of([99])))


def test_plans_get_the_slot_and_the_padded_offsets(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.plans.clear()
    for _ in range(4):
        engine.step(batch_of([1, 2], [3], [4])).result()
    assert simulation.plans == [(slot, [0, 2, 3, 4, 4]) for slot in (0, 1, 2, 0)]


def test_a_result_outlives_later_steps_and_their_slots(engine: GraphEngine) -> None:
    batch = batch_of([5, 6], [7])
    kept = engine.step(batch).result()
    for _ in range(20):
        engine.step(batch_of([900, 901], [902])).result()
    assert kept.vectors.tolist() == expected(batch).tolist()


def test_an_uncollected_result_is_kept_when_its_slot_is_used_again(engine: GraphEngine) -> None:
    batches = [batch_of([number]) for number in range(8)]
    lazies = []
    for batch in batches:
        lazies.append(engine.step(batch))
        wait_until(lambda: not engine.stats()["in_flight"])
    for batch, lazy in zip(batches, lazies, strict=True):
        check(batch, lazy)


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0)


def test_results_that_nobody_lets_go_run_out_of_page_locked_memory_not_of_correctness(
    simulation: Simulation,
) -> None:
    engine = simulation.engine(replace(OPTIONS, max_pinned_bytes=40 * 4096))
    held = []
    with pytest.raises(OutOfMemoryError, match="page-locked"):
        for batch in (batch_of([number]) for number in range(100)):
            held.append((batch, engine.step(batch).result()))  # noqa: PERF401 - what came before the error counts
    for batch, result in held:
        assert result.vectors.tolist() == expected(batch).tolist()
    assert len(held) > 20
    del held, result
    check(batch_of([1]), engine.step(batch_of([1])))


@pytest.mark.parametrize("call", ["host_to_device", "plan", "run", "launch", "device_to_host"])
def test_a_launch_that_fails_anywhere_fails_alone(
    simulation: Simulation, engine: GraphEngine, call: str
) -> None:
    hits = 2 if call == "launch" else 0
    for number in range(hits):
        engine.step(batch_of([number])).result()
    simulation.pause()
    before = engine.step(batch_of([11]))
    simulation.fails[call] = REFUSED
    with pytest.raises(StepError, match="701") as caught:
        engine.step(batch_of([12]) if call == "launch" else batch_of([12] * 60))
    assert type(caught.value) is StepError
    after = engine.step(batch_of([13]))
    simulation.resume()
    check(batch_of([11]), before)
    check(batch_of([13]), after)
    assert engine.stats()["failed_steps"] == 1
    for number in range(10):  # no slot was lost
        check(batch_of([number]), engine.step(batch_of([number])))


def test_memory_errors_are_told_apart(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.fails["run"] = MemoryError("out of memory")
    with pytest.raises(OutOfMemoryError):
        engine.step(batch_of([12]))


def test_a_sticky_error_while_launching_kills_the_engine(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.fails["host_to_device"] = BROKEN
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="700"):
            engine.step(batch_of([12]))
    engine.close()


async def test_a_sticky_error_on_the_device_reaches_all_in_flight(
    simulation: Simulation, engine: GraphEngine
) -> None:
    def fault() -> None:
        raise DeviceError("illegal address", sticky=True)

    simulation.pause()
    simulation.stream.launch(fault)
    lazies = [engine.step(batch_of([number])) for number in (1, 2)]
    simulation.resume()
    for lazy in lazies:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="illegal address"):
                await asyncio.wait_for(lazy, 10)
    with pytest.raises(EngineDeadError):
        engine.step(batch_of([1]))
    assert "illegal address" in str(engine.stats()["dead"])
    engine.close()


def test_a_step_that_never_ends_kills_the_engine(simulation: Simulation) -> None:
    engine = simulation.engine(replace(OPTIONS, step_limit_s=0.05))
    simulation.pause()
    lazy = engine.step(batch_of([1]))
    wait_until(lambda: lazy.done)
    with pytest.raises(EngineDeadError, match=r"0\.05 s"):
        lazy.result()
    with pytest.raises(EngineDeadError):
        engine.step(batch_of([1]))
    engine.close()  # does not wait for the device


def test_nan_marks_its_row_and_leaves_nothing_behind(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.eager.clear()
    simulation.poison = float("nan")
    assert engine.step(batch_of([1])).result().non_finite == (0,)
    simulation.poison = 0.0
    for _ in range(5):
        check(batch_of([1]), engine.step(batch_of([1])))
    assert engine.stats()["non_finite_sequences"] == 1
    assert sum(key.num_tokens == 512 for key in simulation.eager) == 1


def test_shapes_are_captured_on_their_second_hit_and_counted(
    simulation: Simulation, engine: GraphEngine
) -> None:
    for name in (simulation.eager, simulation.captured, simulation.replayed):
        name.clear()
    batches = [batch_of([1] * 20), batch_of([1] * 30), batch_of([1] * 32), batch_of([2] * 17, [3])]
    for batch in batches:
        check(batch, engine.step(batch))
    shape, other = GraphKey(32, 1, "sim"), GraphKey(32, 2, "sim")
    assert simulation.eager == [shape, other]
    assert simulation.captured == [shape]
    assert simulation.replayed == [shape, shape]
    stats = json.loads(json.dumps(engine.stats()))
    assert stats["graphs"]["counts"]["replayed"] == 1
    assert stats["graphs"]["states"] == {"cold": 0, "warmed": 1, "captured": 1, "uncapturable": 0}
    assert (stats["steps"], stats["sequences"], stats["tokens"]) == (4, 5, 100)
    assert stats["padded_tokens"] == 28


def test_a_capture_that_fails_still_answers(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.fails["capture"] = CaptureError("not permitted")
    for number in (1, 2, 3):
        check(batch_of([number]), engine.step(batch_of([number])))
    assert simulation.captured == []


def test_capture_can_be_forbidden_for_a_while(simulation: Simulation, engine: GraphEngine) -> None:
    assert engine.capture_allowed
    engine.capture_allowed = False
    for _ in range(3):
        engine.step(batch_of([1])).result()
    assert simulation.captured == []
    engine.capture_allowed = True
    engine.step(batch_of([1])).result()
    assert simulation.captured == [GraphKey(16, 1, "sim")]


def test_capture_all_leaves_nothing_to_capture(simulation: Simulation) -> None:
    engine = simulation.engine(replace(OPTIONS, capture="all", max_capture_tokens=64))
    count = len(simulation.captured)
    simulation.eager.clear()
    rng = np.random.default_rng(1)
    for _ in range(50):
        lengths = rng.integers(1, 9, rng.integers(1, 9))
        batch = batch_of(*[[7] * length for length in lengths])
        check(batch, engine.step(batch))
    assert simulation.eager == []
    assert len(simulation.captured) == count == len({*simulation.captured})


def test_capture_off_runs_eagerly(simulation: Simulation) -> None:
    engine = simulation.engine(replace(OPTIONS, capture="off"))
    for _ in range(3):
        check(batch_of([1]), engine.step(batch_of([1])))
    assert simulation.captured == []


def test_models_without_a_quantiser_give_no_int8() -> None:
    simulation = Simulation(replace(INFO, has_int8=False))
    engine = simulation.engine()
    result = engine.step(batch_of([4, 5])).result()
    assert result.int8 is None
    assert result.vectors.tolist() == [[9.0, 2.0, 4.0, 0.0]]
    engine.close()
    simulation.stream.close()


def test_a_step_from_another_thread_binds_it(simulation: Simulation, engine: GraphEngine) -> None:
    engine.step(batch_of([1])).result()
    assert simulation.bound == [threading.get_ident()]
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(engine.step(batch_of([2])).result()))
    thread.start()
    thread.join(10)
    assert outcomes[0].vectors[0, 0] == 2
    assert len(simulation.bound) == 2


def test_close_waits_frees_and_keeps_what_was_fetched(simulation: Simulation, engine: GraphEngine) -> None:
    fetched = engine.step(batch_of([3])).result()
    simulation.pause()
    outstanding = engine.step(batch_of([4]))
    threading.Timer(0.05, simulation.resume).start()
    engine.close()
    check(batch_of([4]), outstanding)
    assert fetched.vectors[0, 0] == 3
    with pytest.raises(EngineDeadError, match="closed"):
        engine.step(batch_of([1]))
    engine.close()
    del fetched, outstanding
    assert len(simulation.allocator) == 0
