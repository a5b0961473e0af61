"""What is measured at start: which shapes occur, where graphs stop to gain, how long a step will take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose import inflection
from rose.batch import EngineInfo, RaggedBatch
from rose.buckets import sequence_bucket, token_bucket
from rose.graph_runner import GraphKey
from rose.inflection import ForwardTime, inflection_point
from rose.kernels.cuda.wide import WIDE
from rose.limits import StepLimits
from rose.step_time import StepTimes
from rose.warmup import Warmup, feasible_shapes, synthetic_batch

LIMIT = st.integers(1, 600)


def info_of(max_model_len: int, max_batch_tokens: int, max_batch_seqs: int) -> EngineInfo:
    return EngineInfo(
        "m", "bert", "float32", "cpu", 4, 50, max_model_len, max_batch_tokens, max_batch_seqs, "mean", True
    )


@given(LIMIT, LIMIT, st.integers(1, 40))
def test_a_synthetic_batch_of_every_feasible_shape_is_one_that_step_accepts(
    max_model_len: int, max_batch_tokens: int, max_batch_seqs: int
) -> None:
    info = info_of(max_model_len, max_batch_tokens, max_batch_seqs)
    limits = StepLimits(max_batch_tokens, max_batch_seqs, max_model_len, 50, 0)
    for num_tokens, num_seqs in feasible_shapes(info, max_batch_tokens):
        batch = synthetic_batch(info, num_tokens, num_seqs)
        limits.check(batch)
        assert token_bucket(batch.num_tokens) == num_tokens
        assert sequence_bucket(batch.num_seqs) == num_seqs


@given(st.integers(1, 100), LIMIT, st.integers(1, 40), st.data())
def test_every_batch_falls_into_a_feasible_shape(
    max_model_len: int, max_batch_tokens: int, max_batch_seqs: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, max_model_len), min_size=1, max_size=max_batch_seqs))
    if sum(lengths) > max_batch_tokens:
        return
    shape = token_bucket(sum(lengths)), sequence_bucket(len(lengths))
    info = info_of(max_model_len, max_batch_tokens, max_batch_seqs)
    assert shape in set(feasible_shapes(info, max_batch_tokens))


@given(LIMIT, LIMIT, st.integers(1, 40), st.integers(1, 600))
def test_forwards_are_timed_with_sequences_as_long_as_their_shape_says_or_shorter(
    max_model_len: int, max_batch_tokens: int, max_batch_seqs: int, num_tokens: int
) -> None:
    staged: list[tuple[RaggedBatch, GraphKey]] = []

    class Forward:
        def run(self, key: GraphKey, work: object) -> None:
            pass

    forward: Any = Forward()
    info = info_of(max_model_len, max_batch_tokens, max_batch_seqs)
    warmup = Warmup(
        forward,
        lambda tokens, seqs, longest: GraphKey(tokens, seqs, "sim", longest=longest),
        lambda batch, key: staged.append((batch, key)),  # type: ignore[arg-type,return-value]
        lambda: None,
        info,
    )
    warmup.time_forward(min(num_tokens, max_batch_tokens))
    ((batch, key),) = staged
    assert int(np.diff(batch.cu_seqlens).max()) <= key.longest


def test_neither_a_busy_device_nor_a_busy_processor_is_what_a_forward_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [(9.0, 90.0), (3.0, 30.0), (1.0, 50.0), (2.0, 10.0)]  # the first may compile
    warmup: Any = Warmup.__new__(Warmup)
    monkeypatch.setattr(warmup, "_typical", lambda num_tokens: ("key", "work"), raising=False)
    monkeypatch.setattr(warmup, "_time_once", lambda key, work: ForwardTime(*times.pop(0)), raising=False)
    assert warmup.time_forward(1024) == ForwardTime(1.0, 10.0)
    assert times == []


@pytest.mark.parametrize(
    ("launch_ms", "us_a_token", "expected"),
    [(3.0, 1.5, 8192), (3.0, 0.0, 16_384), (0.01, 1.5, 1024), (1.0, 1.5, 4096), (9.0, 1.5, 16_384)],
)
def test_the_inflection_point_is_where_launches_hide(
    launch_ms: float, us_a_token: float, expected: int
) -> None:
    tried = []

    def time_forward(num_tokens: int) -> ForwardTime:
        tried.append(num_tokens)
        launch_s = launch_ms * 1e-3
        return ForwardTime(launch_s, max(launch_s, us_a_token * 1e-6 * num_tokens))

    assert inflection_point(time_forward, 16_384) == expected
    assert tried == sorted(set(tried))


def test_few_tokens_in_one_launch_say_nothing_of_more_tokens() -> None:
    """All layers of up to 512 tokens are one launch, of more some 200."""

    def time_forward(num_tokens: int) -> ForwardTime:
        launch_s = 1e-4 if num_tokens <= 512 else 8e-3
        return ForwardTime(launch_s, max(launch_s, 1.8e-6 * num_tokens))

    assert inflection_point(time_forward, 131_072) == 32_768
    assert WIDE.max_tokens < inflection.FIRST_TOKENS


class Steps:
    """A device that takes given times, seen through StepTimes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.times: StepTimes[str] = StepTimes(lambda: self.now)

    def run(self, key: str, took_s: float, *, steady: bool = True) -> None:
        ticket = self.times.launched(key)
        self.now += took_s
        self.times.finished(ticket, steady=steady)


def test_one_slow_first_look_is_not_believed() -> None:
    steps = Steps()
    steps.run("a", 5.0)
    assert steps.times.expected_s("a") is None
    steps.run("a", 0.010)
    assert steps.times.expected_s("a") == pytest.approx(0.010)


def test_estimates_fall_at_once_and_rise_slowly() -> None:
    steps = Steps()
    for took_s in (0.010, 0.010, 1.0):
        steps.run("a", took_s)
    assert steps.times.expected_s("a") == pytest.approx(0.0102)
    steps.run("a", 0.004)
    assert steps.times.expected_s("a") == pytest.approx(0.004)


def test_unsteady_steps_teach_nothing_and_forgetting_starts_over() -> None:
    steps = Steps()
    for _ in range(3):
        steps.run("a", 3.0, steady=False)
    assert steps.times.expected_s("a") is None
    for _ in range(2):
        steps.run("a", 0.01)
    steps.times.forget("a")
    assert steps.times.expected_s("a") is None


def test_a_step_is_due_after_those_before_it() -> None:
    steps = Steps()
    for key, took_s in (("a", 0.010), ("a", 0.010), ("b", 0.020), ("b", 0.020)):
        steps.run(key, took_s)
    first = steps.times.launched("a")
    steps.now += 0.004
    second = steps.times.launched("b")
    assert steps.times.due_s(first) == pytest.approx(steps.now + 0.006)
    assert steps.times.due_s(second) == pytest.approx(steps.now + 0.026)
    steps.now += 0.006
    steps.times.finished(first, steady=True)
    steps.now += 0.020
    steps.times.finished(second, steady=True)
    assert steps.times.expected_s("b") == pytest.approx(0.020)
    assert steps.times.due_s(steps.times.launched("c")) is None
    assert steps.times.due_s(second) == pytest.approx(steps.now)  # over, so no step counts


def test_a_later_step_fetched_first_finishes_those_before_it() -> None:
    steps = Steps()
    tickets = [steps.times.launched("a") for _ in range(3)]
    steps.now += 1.0
    steps.times.finished(tickets[1], steady=True)
    steps.times.finished(tickets[0], steady=True)
    assert steps.times.expected_s("a") is None
    steps.now += 0.01
    steps.times.finished(tickets[2], steady=True)
    steps.run("a", 0.02)
    assert steps.times.expected_s("a") == pytest.approx(0.01)
