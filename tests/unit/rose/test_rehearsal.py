"""Rehearsals on the simulated device: they change nothing, and what goes wrong in them stops only them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cuda_utils.completion import _POLLERS, Poller
from cuda_utils.errors import DeviceError
from cuda_utils.event import CpuEvent
from rose.batch import BatchResult, LazyTensor
from rose.errors import EngineDeadError
from rose.graph_engine import GraphEngine
from rose.step_time import StepTimes
from tests.unit.rose.simulated_device import BROKEN, REFUSED, Simulation, batch_of, check, random_batch
from tests.virtual_loop import run_virtual


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulation = Simulation()
    yield simulation
    simulation.resume()
    simulation.side.gate.set()
    simulation.stream.close()
    simulation.side.stream.close()


@pytest.fixture
def engine(simulation: Simulation) -> GraphEngine:
    return simulation.engine()


def test_steps_and_counters_are_what_they_are_without(simulation: Simulation, engine: GraphEngine) -> None:
    rng = np.random.default_rng(0)
    running = []
    for _ in range(200):
        batch = random_batch(rng)
        simulation.stream.synchronize()
        simulation.pause()
        running.append((batch, engine.step(batch)))
        launched = list(simulation.plans), simulation.launches
        before = engine.stats()
        engine.rehearse(batch)
        engine.rehearse(batch)
        assert engine.stats() == before
        assert launched == (simulation.plans, simulation.launches)
        simulation.resume()
        if len(running) == 3:
            check(*running.pop(0))
    for batch, lazy in running:
        check(batch, lazy)
    assert simulation.side.launches >= 100


def test_it_stages_what_a_step_stages_but_no_address(simulation: Simulation, engine: GraphEngine) -> None:
    batch = batch_of([1, 2, 3], [4])
    engine.step(batch).result()
    engine.rehearse(batch)
    simulation.side.stream.synchronize()
    layout, scratch = simulation.layout, simulation.side.scratch
    assert scratch[:3].tolist() == [0, 3, 4]
    assert scratch[layout.result_at :][:18].tolist() == [0, 0, 1, 2, 3, 4, *[0] * 12]
    assert scratch[layout.size(16)] == -7


def test_its_slot_is_not_filled_again_while_it_is_read(simulation: Simulation, engine: GraphEngine) -> None:
    side, batches = simulation.side, [batch_of([1] * 9), batch_of([2] * 9)]
    for batch in batches:
        engine.step(batch).result()
    side.gate.clear()
    for batch in batches:
        engine.rehearse(batch)
    assert side.launches == 1
    check(batches[0], engine.step(batches[0]))  # no step waits for it
    side.gate.set()
    side.stream.synchronize()
    assert side.scratch[simulation.layout.ids_at] == 1
    engine.rehearse(batches[1])
    assert side.launches == 2


@pytest.mark.parametrize("error", [REFUSED, BROKEN, MemoryError("no more")], ids=["plain", "sticky", "other"])
def test_an_error_at_its_launch_ends_rehearsals_with_one_line(
    simulation: Simulation, engine: GraphEngine, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    batch = batch_of([1])
    engine.step(batch).result()
    simulation.side.fails = error
    for _ in range(3):
        engine.rehearse(batch)
        simulation.side.fails = None
        check(batch, engine.step(batch))
    error.__traceback__ = None  # its frames hold a slot
    assert simulation.side.launches == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert (engine.stats()["failed_steps"], engine.stats()["dead"]) == (0, None)
    engine.close()
    assert len(simulation.allocator) == 0


def test_so_does_one_of_the_device_behind_it(
    simulation: Simulation, engine: GraphEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def fault() -> None:
        raise DeviceError("illegal address", sticky=True)

    batch = batch_of([1])
    engine.step(batch).result()
    simulation.side.stream.launch(fault)
    for _ in range(3):
        engine.rehearse(batch)
        with pytest.raises(DeviceError):
            simulation.side.stream.synchronize()
        check(batch, engine.step(batch))
    assert len(caplog.records) == 1
    engine.close()
    assert len(simulation.allocator) == 0


def test_close_waits_for_it_and_nothing_is_rehearsed_afterwards(
    simulation: Simulation, engine: GraphEngine
) -> None:
    batch = batch_of([3])
    engine.step(batch).result()
    simulation.side.gate.clear()
    engine.rehearse(batch)
    threading.Timer(0.05, simulation.side.gate.set).start()
    engine.close()
    assert simulation.side.gate.is_set()
    assert len(simulation.allocator) == 0
    engine.rehearse(batch)
    assert simulation.side.launches == 1


def test_a_dead_engine_and_another_thread_rehearse_nothing(
    simulation: Simulation, engine: GraphEngine
) -> None:
    batch = batch_of([3])
    engine.step(batch).result()
    thread = threading.Thread(target=engine.rehearse, args=(batch,))
    thread.start()
    thread.join(10)
    simulation.fails["host_to_device"] = BROKEN
    with pytest.raises(EngineDeadError):
        engine.step(batch)
    engine.rehearse(batch)
    assert simulation.side.launches == 0


def test_an_engine_without_a_side_stream_has_none(simulation: Simulation) -> None:
    simulation.nouns = replace(simulation.nouns, side=None)
    engine = simulation.engine()
    batch = batch_of([3])
    check(batch, engine.step(batch))
    engine.rehearse(batch)
    engine.close()
    assert (simulation.side.launches, len(simulation.allocator)) == (0, 0)


def test_who_wants_to_know_hears_when_an_end_is_near(simulation: Simulation, engine: GraphEngine) -> None:
    batch, told_s = batch_of([3]), list[float]()
    lazy = engine.step(batch)
    lazy.near(0.002)
    engine.on_near = told_s.append
    for left_s in (0.002, 0.0004):
        simulation.side.stream.synchronize()
        lazy.near(left_s)
    simulation.side.stream.synchronize()
    assert told_s == pytest.approx([0.0019, 0.0003])  # less what the engine's own takes
    assert simulation.side.launches == 3
    check(batch, lazy)
    lazy.near(0.001)
    assert len(told_s) == 2


class AskedEvent(CpuEvent):
    """As a CUDA event: has to be asked."""

    def subscribe(self, callback: object) -> bool:
        return False


@pytest.mark.timeout(60)
@pytest.mark.parametrize("closes", [False, True])
def test_awaited_steps_that_take_long_are_rehearsed_once_or_twice(
    simulation: Simulation, *, closes: bool
) -> None:
    """In virtual time: a loop that wakes 2 ms late, as on a busy machine, rehearses nothing."""
    simulation.nouns = replace(simulation.nouns, new_event=lambda: AskedEvent(simulation.stream))
    run_virtual(awaited_steps(simulation, closes=closes))


async def awaited_steps(simulation: Simulation, *, closes: bool) -> None:
    loop, engine, batch = asyncio.get_running_loop(), simulation.engine(), batch_of([5, 6])
    _POLLERS[loop], engine._times = Poller(loop.time), StepTimes(loop.time)
    counts = []
    for _ in range(20):
        before = simulation.side.launches
        simulation.pause()
        loop.call_later(0.01, end_step, simulation)
        lazy = engine.step(batch)
        await lazy
        check(batch, lazy)
        counts.append(simulation.side.launches - before)
        simulation.side.stream.synchronize()
    assert counts[0] == 0, "nobody knows yet how long it takes"
    assert set(counts[5:]) <= {1, 2}
    if closes:
        simulation.stream.launch(lambda: time.sleep(0.01))
        waiting = asyncio.ensure_future(awaiting(engine.step(batch)))
        await asyncio.sleep(0)
        engine.close()
        assert (await waiting).vectors[0, 0] == 11


def end_step(simulation: Simulation) -> None:
    """No virtual time passes until its stream is through."""
    simulation.resume()
    simulation.stream.synchronize()


async def awaiting(lazy: LazyTensor[BatchResult]) -> BatchResult:
    return await lazy
