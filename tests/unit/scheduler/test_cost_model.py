from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from scheduler.cost_model import CostModel, CostPoint

LENGTH = 128


def step_ms(tokens: int) -> float:
    """A 0.6B model on an H200, roughly: flat while memory-bound, then in proportion."""
    return max(1.0, 0.55 + tokens * 0.002)


def model(**options: object) -> CostModel:
    return CostModel(**{"floor": 256, "ceiling": 16_384, **options})  # type: ignore[arg-type]


def teach(cost: CostModel, tokens: int, ms: float, times: int = 4, length: int = LENGTH) -> None:
    for _ in range(times):
        cost.observe(tokens, max(1, tokens // length), ms)


def saturate(cost: CostModel, time_of: Callable[[int], float], steps: int, length: int = LENGTH) -> int:
    """Run batches of the budget, as with an endless queue, and return the last budget."""
    for _ in range(steps):
        tokens = max(length, cost.budget(length * 1000, 1000) // length * length)
        cost.observe(tokens, tokens // length, time_of(tokens))
    return cost.budget(length * 1000, 1000)


def test_knows_nothing_at_first() -> None:
    cost = model()
    assert cost.predict(512, 4) == 0.0
    assert cost.budget(512, 4) == 256
    assert cost.tokens_per_s == 0.0


def test_predicts_what_it_saw_and_interpolates_between() -> None:
    cost = model()
    for tokens in (512, 1024, 2048, 4096):
        teach(cost, tokens, step_ms(tokens))
    assert cost.predict(1024, 8) == pytest.approx(step_ms(1024), rel=0.02)
    assert cost.predict(1536, 12) == pytest.approx(step_ms(1536), rel=0.02)
    assert cost.predict(8192, 64) == pytest.approx(2 * step_ms(4096), rel=0.02)
    assert cost.tokens_per_s > 0


def test_small_gains_that_go_on_add_up() -> None:
    def slowly_better(tokens: int) -> float:
        halves = 2 * math.log2(min(tokens, 4096) / 512)
        return tokens / (400 * 1.04**halves)

    cost = model(floor=512)
    for tokens in (512, 768, 1152):  # as chance has them: none is 5 % better than the one before
        teach(cost, tokens, slowly_better(tokens))
    budget = saturate(cost, slowly_better, 200)
    assert budget / slowly_better(budget) >= 0.95 * 4096 / slowly_better(4096)


def test_long_sequences_have_times_of_their_own() -> None:
    cost = model()
    teach(cost, 4096, 8.0, length=128)
    teach(cost, 4096, 12.5, length=4096)
    assert cost.predict(4096, 32) == 8.0
    assert cost.predict(4096, 1) == 12.5
    assert cost.predict(4096, 20) == 8.0  # no steps of this length yet: the nearest class


@pytest.mark.parametrize("order", ["cold first", "cold among warm"])
def test_cold_steps_and_captures_do_not_count(order: str) -> None:
    cost = model()
    samples = [300.0, 45.0] + [1.6] * 10
    if order == "cold among warm":
        random.Random(1).shuffle(samples)
    for ms in samples:
        cost.observe(512, 4, ms)
    assert cost.predict(512, 4) == 1.6


def test_a_single_cold_step_is_bounded_by_larger_steps() -> None:
    cost = model()
    teach(cost, 512, 1.6)
    cost.observe(128, 1, 300.0)
    assert cost.predict(128, 1) <= 1.6


def test_a_stalled_loop_that_shortens_a_step_does_not_count() -> None:
    cost = model()
    for ms in (1.6, 1.6, 0.01, 1.6, 1.6, 1.6, 0.01, 1.6):
        cost.observe(512, 4, ms)
    assert cost.predict(512, 4) == 1.6


def test_follows_a_device_that_slows_down_or_speeds_up() -> None:
    cost = model()
    for ms in (2.0, 3.0, 1.5):
        teach(cost, 512, ms, times=16)
        assert cost.predict(512, 4) == pytest.approx(ms, rel=0.02)


def test_the_budget_grows_to_the_knee_and_stays() -> None:
    cost = model()
    budget = saturate(cost, step_ms, 40)
    # From here on, twice the tokens would raise throughput by about 5 %.
    rate, twice = budget / step_ms(budget), 2 * budget / step_ms(2 * budget)
    assert 2048 <= budget <= 5632
    assert twice / rate < 1.08
    assert saturate(cost, step_ms, 40) == budget


def test_a_saturated_device_gets_small_batches() -> None:
    assert saturate(model(), lambda tokens: tokens * 0.05, 40) <= 512


def test_an_unsaturable_device_gets_the_ceiling_and_never_more() -> None:
    assert saturate(model(ceiling=5000), lambda tokens: 5.0, 60) == 5000


def test_steps_beyond_the_ceiling_are_predicted_and_do_not_move_the_budget() -> None:
    cost = model(ceiling=4096)
    for tokens in (1024, 2048, 4096):
        teach(cost, tokens, tokens * 0.002)
    before = cost.budget(LENGTH * 1000, 1000)
    teach(cost, 32_768, 32_768 * 0.0015)
    assert cost.budget(LENGTH * 1000, 1000) == before == 1024
    assert cost.predict(32_768, 256) == pytest.approx(49.2, rel=0.01)
    alone = model(ceiling=4096)
    teach(alone, 32_768, 50.0)
    assert alone.budget(LENGTH * 1000, 1000) == 4096


def test_the_floor_holds_and_bends_to_the_ceiling() -> None:
    assert model(floor=1000).budget(10, 1) == 1000
    assert model(floor=1000, ceiling=100).budget(10, 1) == 100


def test_three_cold_steps_do_not_stop_the_growth() -> None:
    cost = model()
    teach(cost, 512, step_ms(512), times=8)
    teach(cost, 1024, 80.0, times=3)
    assert cost.budget(128_000, 1000) >= 1024


def test_a_poor_first_impression_heals() -> None:
    cost = model()
    teach(cost, 512, step_ms(512), times=8)
    teach(cost, 1024, 80.0, times=8)  # every graph of this size was cold
    assert cost.budget(128_000, 1000) == 512
    assert saturate(cost, step_ms, 3000) >= 2048


def test_a_table_measured_beside_others_work_heals_within_its_first_steps() -> None:
    times = {512: step_ms(512), 1024: 40.0, 2048: 60.0, 4096: 90.0, 8192: 150.0}
    cost = model(seed=[CostPoint(tokens, tokens // LENGTH, ms) for tokens, ms in times.items()])
    assert cost.budget(128_000, 1000) == 512
    assert saturate(cost, step_ms, 300) >= 2048


def test_a_table_is_believed_until_steps_say_otherwise() -> None:
    table = [CostPoint(tokens, tokens // LENGTH, step_ms(tokens)) for tokens in (512, 1024, 2048, 4096, 8192)]
    cost = model(seed=table)
    assert cost.predict(2048, 16) == pytest.approx(step_ms(2048))
    assert 2048 <= cost.budget(128_000, 1000) <= 4096
    teach(cost, 2048, 6.0, times=16)
    assert cost.predict(2048, 16) == 6.0


def test_the_rate_is_that_of_recent_steps() -> None:
    cost = model()
    teach(cost, 1000, 10.0, times=200)
    assert cost.tokens_per_s == pytest.approx(100_000)
    teach(cost, 1000, 20.0, times=200)
    assert cost.tokens_per_s == pytest.approx(50_000, rel=0.01)
    assert "50" in repr(cost)
