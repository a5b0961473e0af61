"""The engine of devices with graphs, on a simulated one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cuda_utils.errors import DeviceError
from rose.batch import RaggedBatch
from rose.errors import EngineDeadError, OutOfMemoryError, StepError
from rose.graph_engine import GraphEngine
from rose.graph_runner import CaptureError, GraphKey
from tests.unit.rose.simulated_device import (
    BROKEN,
    INFO,
    OPTIONS,
    REFUSED,
    Simulation,
    batch_of,
    check,
    expected,
    random_batch,
)


def test_random_batches_with_three_in_flight_all_come_back_right(
    simulation: Simulation, engine: GraphEngine
) -> None:
    rng = np.random.default_rng(0)
    running = []
    for _ in range(600):
        batch = random_batch(rng)
        running.append((batch, engine.step(batch)))
        if len(running) == 3:
            check(*running.pop(0))
    for batch, lazy in running:
        check(batch, lazy)
        squares = lazy.result().squares
        assert (squares is not None) == simulation.delivers
        if squares is not None:
            np.testing.assert_allclose(squares, np.square(expected(batch)).sum(axis=1), rtol=1e-6)


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
def test_a_launch_that_fails_anywhere_fails_alone(simulation: Simulation, call: str) -> None:
    simulation.delivers &= call != "device_to_host"  # what the device delivers is not copied
    engine = simulation.engine()
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


@pytest.mark.parametrize("call", ["run", "launch"])
def test_a_device_that_delivers_writes_no_row_of_a_step_that_failed(
    simulation: Simulation, call: str
) -> None:
    simulation.delivers = True
    engine = simulation.engine()
    simulation.fails["device_to_host"] = REFUSED  # never called
    kept = [(batch, engine.step(batch).result()) for batch in (batch_of([number]) for number in range(2))]
    simulation.fails[call] = REFUSED
    with pytest.raises(StepError, match="701"):
        engine.step(batch_of([12]) if call == "launch" else batch_of([12] * 60))
    for number in range(10):
        check(batch_of([number]), engine.step(batch_of([number])))
    for batch, result in kept:
        assert result.vectors.tolist() == expected(batch).tolist()


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


@pytest.mark.parametrize("wrong", [1000, -1, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_fails_its_own_row_alone(
    simulation: Simulation, engine: GraphEngine, wrong: int
) -> None:
    simulation.eager.clear()
    batch = batch_of([1, 2], [3, wrong, 4], [5])
    for _ in range(3):  # eagerly, captured, replayed
        result = engine.step(batch).result()
        assert result.non_finite == (1,)
        assert np.isnan(result.vectors[1]).all()
        assert result.vectors[[0, 2]].tolist() == expected(batch)[[0, 2]].tolist()
    check(batch_of([9], [8]), engine.step(batch_of([9], [8])))
    assert (engine.stats()["non_finite_sequences"], engine.stats()["failed_steps"]) == (3, 0)
    assert not any(key.num_tokens == 512 for key in simulation.eager)  # nothing was left behind to overwrite


async def test_so_does_a_type_out_of_range_and_every_span_of_its_sequence(engine: GraphEngine) -> None:
    types = [None, np.array([0, 2], np.int32), None]
    spans = [None, np.array([[0, 1], [1, 2], [2, 2]], np.int32), np.array([[0, 0], [0, 1]], np.int32)]
    sequences = [np.array(ids, np.int32) for ids in ([1], [2, 3], [4])]
    assert (await engine.step(RaggedBatch.pack(sequences, types))).non_finite == (1,)
    result = await engine.step(RaggedBatch.pack(sequences, types, spans))
    assert result.non_finite == (1, 2)
    assert result.vectors[[0, 4, 5]].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [4, 1, 4, 0]]


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


def test_while_many_wait_captures_are_few(
    simulation: Simulation, engine: GraphEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.graph_runner.HURRIED_SHARE", 1e-9)
    assert engine.capture_freely
    engine.capture_freely = False
    few, more = batch_of([1]), batch_of([1] * 20)
    for batch in (few, few, more, more, more):
        engine.step(batch).result()
    assert simulation.captured == [GraphKey(16, 1, "sim")]
    engine.capture_freely = True
    engine.step(more).result()
    assert simulation.captured == [GraphKey(16, 1, "sim"), GraphKey(32, 1, "sim")]


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
