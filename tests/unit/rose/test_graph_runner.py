"""Every step runs its own inputs exactly once, however captures fail, are put off or evict one another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rose.graph_runner import (
    ADMIT_HITS,
    HURRIED_SHARE,
    RETRY_HITS,
    CaptureError,
    Execution,
    GraphKey,
    GraphLimits,
    GraphRunner,
)

LIMITS = GraphLimits("lazy", max_tokens=1024, max_graphs=3, max_bytes=100)
COLD, EAGER, CAPTURED, REPLAYED = Execution


class RecordedGraph:
    def __init__(self, device: FakeDevice, key: GraphKey, nbytes: int) -> None:
        self.device = device
        self.key = key
        self.nbytes = nbytes
        self.closed = False

    def launch(self) -> None:
        assert not self.closed
        self.device.ran.append((self.key, self.device.staged))

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.device.graphs.remove(self)


class FakeDevice:
    """Runs whatever is staged, as a device with static buffers does; remembers what ran on what."""

    def __init__(self) -> None:
        self.staged = 0
        self.ran: list[tuple[GraphKey, int]] = []
        self.graphs: list[RecordedGraph] = []
        self.captures = 0
        self.now_s, self.capture_s = 0.0, 0.0
        self.nbytes = 10
        self.fails: Exception | None = None
        self.uncapturable = "none"

    def run(self, key: GraphKey, work: int) -> None:
        assert work == self.staged
        self.ran.append((key, self.staged))

    def capture(self, key: GraphKey, work: int) -> RecordedGraph:
        self.captures += 1
        self.now_s += self.capture_s
        if self.fails is not None:
            raise self.fails
        graph = RecordedGraph(self, key, self.nbytes)
        self.graphs.append(graph)
        return graph

    def capturable(self, key: GraphKey) -> bool:
        return key.attention != self.uncapturable


def key_of(num_tokens: int, attention: str = "fa4") -> GraphKey:
    return GraphKey(num_tokens, 1, attention)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def hit(runner: GraphRunner[int], device: FakeDevice, *keys: GraphKey) -> list[Execution]:
    """Stage a new input for each key, run it, and check that exactly this ran."""
    executions = []
    for key in keys:
        device.staged += 1
        before = len(device.ran)
        executions.append(runner.run(runner.entry(key), device.staged))
        assert device.ran[before:] == [(key, device.staged)]
    return executions


def test_first_eager_second_captured_then_replayed(device: FakeDevice) -> None:
    runner = GraphRunner(device, LIMITS)
    assert hit(runner, device, *[key_of(64)] * 4) == [COLD, CAPTURED, REPLAYED, REPLAYED]
    assert device.captures == 1


def test_off_and_too_large_and_uncapturable_run_eagerly(device: FakeDevice) -> None:
    device.uncapturable = "sdpa"
    off = GraphRunner(device, replace(LIMITS, mode="off"))
    lazy = GraphRunner(device, LIMITS)
    assert hit(off, device, *[key_of(64)] * 3) == [COLD, EAGER, EAGER]
    assert hit(lazy, device, *[key_of(1088)] * 3) == [COLD, EAGER, EAGER]
    assert hit(lazy, device, *[key_of(64, "sdpa")] * 3) == [COLD, EAGER, EAGER]
    assert device.captures == 0


def test_a_failed_capture_is_tried_again_ever_more_seldom(device: FakeDevice) -> None:
    """It may have been a passing lack of memory, or fail at every try."""
    runner = GraphRunner(device, LIMITS)
    device.fails = CaptureError("operation not permitted when stream is capturing")
    tries = []
    for number in range(16 * RETRY_HITS):
        assert hit(runner, device, key_of(64)) == [EAGER if number else COLD]
        if device.captures > len(tries):
            tries.append(number)
    first = RETRY_HITS + 1
    assert tries == [1, 1 + first, 2 + 3 * RETRY_HITS + 1, 3 + 7 * RETRY_HITS + 1, 4 + 15 * RETRY_HITS + 1]
    assert runner.stats()["states"] == {"cold": 0, "warmed": 1, "captured": 0, "uncapturable": 0}


def test_a_shape_whose_capture_failed_is_captured_once_that_goes(device: FakeDevice) -> None:
    runner = GraphRunner(device, LIMITS)
    device.fails = CaptureError("out of memory")
    hit(runner, device, *[key_of(64)] * 2)
    device.fails = None
    assert hit(runner, device, *[key_of(64)] * RETRY_HITS) == [EAGER] * RETRY_HITS
    assert hit(runner, device, *[key_of(64)] * 2) == [CAPTURED, REPLAYED]
    hit(runner, device, *[key for tokens in (128, 192, 256) for key in [key_of(tokens)] * (ADMIT_HITS + 1)])
    assert hit(runner, device, *[key_of(64)] * (ADMIT_HITS + 1))[-1] is CAPTURED  # as if it had never failed


def test_while_many_wait_failed_captures_take_a_share_of_the_time_too(device: FakeDevice) -> None:
    device.capture_s, device.fails = 1.0, CaptureError("out of memory")
    runner = GraphRunner(device, LIMITS, clock=lambda: device.now_s)
    runner.capture_freely = False
    for tokens in (64, 128, 192):
        hit(runner, device, *[key_of(tokens)] * 3)
    assert device.captures == 1


def test_an_error_of_the_device_is_passed_on(device: FakeDevice) -> None:
    runner = GraphRunner(device, LIMITS)
    hit(runner, device, key_of(64))
    device.fails = RuntimeError("illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        runner.run(runner.entry(key_of(64)), device.staged)


def test_while_many_wait_captures_take_a_share_of_the_time(device: FakeDevice) -> None:
    """Never captured, a full queue would stay full: small steps take four times as long without a graph."""
    device.capture_s = 1.0
    runner = GraphRunner(device, LIMITS, clock=lambda: device.now_s)
    runner.capture_freely = False
    assert hit(runner, device, *[key_of(64)] * 3) == [COLD, CAPTURED, REPLAYED]
    for _ in range(8):
        device.now_s += 0.49
        assert hit(runner, device, key_of(128)) != [CAPTURED]
    device.now_s += 0.49
    assert device.now_s - 1.0 >= 1.0 / HURRIED_SHARE - 1.0
    assert hit(runner, device, *[key_of(128)] * 2) == [CAPTURED, REPLAYED]
    assert hit(runner, device, *[key_of(192)] * 3) == [COLD, EAGER, EAGER]
    runner.capture_freely = True
    assert hit(runner, device, *[key_of(192)] * 2) == [CAPTURED, REPLAYED]


def test_the_least_recently_used_graph_makes_room_for_a_shape_that_proved_itself(device: FakeDevice) -> None:
    runner = GraphRunner(device, LIMITS)
    old = [key_of(tokens) for tokens in (64, 128, 192)]
    for key in old:
        hit(runner, device, key, key)
    hit(runner, device, old[0])
    new = key_of(256)
    assert hit(runner, device, *[new] * (ADMIT_HITS + 1)) == [COLD] + [EAGER] * (ADMIT_HITS - 1) + [CAPTURED]
    assert {graph.key for graph in device.graphs} == {old[0], old[2], new}
    assert hit(runner, device, old[1]) == [COLD]
    stats = runner.stats()
    assert stats["counts"] == {"eager": 3 + ADMIT_HITS + 1, "captures": 4, "replayed": 1, "evicted": 1}


def test_a_cycle_of_one_shape_too_many_mostly_replays(device: FakeDevice) -> None:
    runner = GraphRunner(device, LIMITS)
    executions = hit(runner, device, *[key_of(64 * n) for n in (1, 2, 3, 4)] * 50)
    assert executions.count(CAPTURED) <= len(executions) / ADMIT_HITS
    assert executions.count(REPLAYED) > len(executions) / 2


def test_bytes_are_bounded_too(device: FakeDevice) -> None:
    runner = GraphRunner(device, replace(LIMITS, max_graphs=100))
    device.nbytes = 40
    for tokens in (64, 128):
        hit(runner, device, *[key_of(tokens)] * 2)
    device.nbytes = 50
    hit(runner, device, *[key_of(192)] * (ADMIT_HITS + 1))
    assert [graph.key.num_tokens for graph in device.graphs] == [128, 192]
    assert runner.stats()["bytes"] == 90
    device.nbytes = 101
    assert hit(runner, device, *[key_of(256)] * (ADMIT_HITS + 2))[1:] == [EAGER] * (ADMIT_HITS + 1)
    assert len(device.graphs) == 2


def test_a_cycle_of_more_bytes_than_fit_mostly_replays(device: FakeDevice) -> None:
    runner = GraphRunner(device, replace(LIMITS, max_graphs=100))
    device.nbytes = 60
    executions = hit(runner, device, *[key_of(64), key_of(128)] * 100)
    assert executions.count(CAPTURED) <= len(executions) / ADMIT_HITS
    assert executions.count(REPLAYED) > len(executions) / 3


def test_all_are_captured_at_start_in_the_order_given(device: FakeDevice) -> None:
    runner = GraphRunner(device, replace(LIMITS, mode="all", max_graphs=10))
    keys = [key_of(2048), key_of(128), key_of(64)]

    def work_of(key: GraphKey) -> int:
        device.staged += 1
        return device.staged

    runner.capture_all(keys, work_of)
    assert [graph.key for graph in device.graphs] == keys[1:]
    assert hit(runner, device, key_of(64), key_of(128)) == [REPLAYED, REPLAYED]


def test_capturing_all_stops_at_the_bound(device: FakeDevice) -> None:
    runner = GraphRunner(device, replace(LIMITS, mode="all"))
    runner.capture_all([key_of(64 * n) for n in (5, 4, 3, 2, 1)], lambda key: device.staged)
    assert [graph.key.num_tokens for graph in device.graphs] == [320, 256, 192]


def test_stats_say_what_each_shape_did_as_plain_json(device: FakeDevice) -> None:
    times = iter([10.0, 10.5])
    runner = GraphRunner(device, LIMITS, clock=lambda: next(times))
    hit(runner, device, *[key_of(64)] * 3, key_of(2048))
    stats = json.loads(json.dumps(runner.stats()))
    assert stats["capture_ms"] == 500.0
    assert stats["states"] == {"cold": 0, "warmed": 1, "captured": 1, "uncapturable": 0}
    assert stats["buckets"][0] == {
        "num_tokens": 64,
        "num_seqs": 1,
        "attention": "fa4",
        "spans": False,
        "tokens": [],
        "state": "captured",
        "eager": 1,
        "captures": 1,
        "replayed": 1,
        "evicted": 0,
        "capture_ms": 500.0,
        "bytes": 10,
        "longest": 0,
    }


def test_close_gives_up_every_graph(device: FakeDevice) -> None:
    runner = GraphRunner(device, LIMITS)
    hit(runner, device, *[key_of(64)] * 2, *[key_of(128)] * 2)
    runner.close()
    assert device.graphs == []
    assert runner.stats()["bytes"] == 0


class AnyHistory(RuleBasedStateMachine):
    """Hits, failures, large graphs and pauses in any order."""

    @initialize(max_graphs=st.integers(1, 4), max_bytes=st.integers(10, 60))
    def start(self, max_graphs: int, max_bytes: int) -> None:
        self.device = FakeDevice()
        self.limits = GraphLimits("lazy", 512, max_graphs, max_bytes)
        self.runner = GraphRunner(self.device, self.limits)

    @rule(tokens=st.sampled_from([64, 128, 256, 512, 1024]), times=st.integers(1, ADMIT_HITS + 2))
    def hit(self, tokens: int, times: int) -> None:
        hit(self.runner, self.device, *[key_of(tokens)] * times)

    @rule(fails=st.booleans())
    def break_or_mend_capture(self, fails: bool) -> None:
        self.device.fails = CaptureError("no") if fails else None

    @rule(nbytes=st.integers(1, 70))
    def change_the_size_of_graphs(self, nbytes: int) -> None:
        self.device.nbytes = nbytes

    @rule(freely=st.booleans())
    def take_time_or_a_share(self, freely: bool) -> None:
        self.runner.capture_freely = freely

    @invariant()
    def bounded(self) -> None:
        graphs = self.device.graphs
        assert len(graphs) <= self.limits.max_graphs
        assert sum(graph.nbytes for graph in graphs) <= self.limits.max_bytes
        assert all(graph.key.num_tokens <= self.limits.max_tokens for graph in graphs)
        assert self.runner.stats()["bytes"] == sum(graph.nbytes for graph in graphs)


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyHistory = AnyHistory.TestCase
