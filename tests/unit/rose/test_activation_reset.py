"""What a batch with NaN may have left in the activations, on a simulated device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose import activation_reset
from rose.errors import StepError
from rose.graph_engine import GraphEngine
from tests.unit.rose.simulated_device import OPTIONS, REFUSED, Simulation, batch_of, check


def test_nan_marks_its_row_and_leaves_nothing_behind(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.eager.clear()
    simulation.poison = float("nan")
    assert engine.step(batch_of([1])).result().non_finite == (0,)
    simulation.poison = 0.0
    for _ in range(5):
        check(batch_of([1]), engine.step(batch_of([1])))
    assert engine.stats()["non_finite_sequences"] == 1
    assert sum(key.num_tokens == 512 for key in simulation.eager) == 1


def test_after_nan_as_many_steps_are_in_flight_as_before(simulation: Simulation) -> None:
    """What overwrites the activations takes none of two slots."""
    engine = simulation.engine(replace(OPTIONS, max_in_flight=2))
    simulation.poison = float("nan")
    engine.step(batch_of([1])).result()
    simulation.poison = 0.0
    simulation.pause()
    batches = [batch_of([1]), batch_of([2, 3])]
    lazies = [engine.step(batch) for batch in batches]
    with pytest.raises(StepError, match="2 steps"):
        engine.step(batch_of([4]))
    simulation.resume()
    for batch, lazy in zip(batches, lazies, strict=True):
        check(batch, lazy)


def test_nan_of_two_steps_in_flight_is_overwritten_once(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.eager.clear()
    simulation.poison = float("nan")
    first, second = (engine.step(batch_of([number])) for number in (1, 2))
    assert first.result().non_finite == (0,)
    simulation.stream.synchronize()
    simulation.poison = 0.0
    third = engine.step(batch_of([3]))
    assert second.result().non_finite == (0,)
    check(batch_of([3]), third)
    check(batch_of([4]), engine.step(batch_of([4])))
    assert sum(key.num_tokens == 512 for key in simulation.eager) == 1


def test_what_a_small_step_left_takes_a_small_reset(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_reset, "USUAL_TOKENS", 64)
    engine, large = simulation.engine(), batch_of([7] * 100)
    for batch, expected_sizes in ((batch_of([1]), [64]), (large, [512]), (batch_of([1] * 64), [64])):
        engine.step(batch).result()
        simulation.eager.clear()
        simulation.poison = float("nan")
        assert engine.step(batch).result().non_finite == (0,)
        simulation.poison = 0.0
        check(batch_of([2]), engine.step(batch_of([2])))
        assert [key.num_tokens for key in simulation.eager if key.num_seqs == 16] == expected_sizes


def test_a_large_step_before_a_small_reset_takes_another_one(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_reset, "USUAL_TOKENS", 64)
    engine = simulation.engine()
    simulation.poison = float("nan")
    first, second = engine.step(batch_of([1])), engine.step(batch_of([7] * 100))
    assert first.result().non_finite == (0,)
    simulation.stream.synchronize()
    simulation.poison = 0.0
    simulation.eager.clear()
    third = engine.step(batch_of([3]))
    assert second.result().non_finite == (0,)
    check(batch_of([3]), third)
    check(batch_of([7] * 90), engine.step(batch_of([7] * 90)))
    assert [key.num_tokens for key in simulation.eager if key.num_seqs == 16] == [64, 512]


def test_a_reset_that_fails_is_tried_again(simulation: Simulation, engine: GraphEngine) -> None:
    simulation.poison = float("nan")
    engine.step(batch_of([1])).result()
    simulation.poison = 0.0
    simulation.fails["plan"] = REFUSED
    with pytest.raises(StepError, match="701"):
        engine.step(batch_of([2]))
    check(batch_of([3]), engine.step(batch_of([3])))
