"""Random clients against a random engine, in virtual time: nothing is lost, every limit and order holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rose.batch import Int32, RaggedBatch
from rose.errors import EngineError, OutOfMemoryError, StepError
from scheduler.batcher import Batcher
from scheduler.errors import DeadlineExpired, EngineDead, QueueFull, SchedulerError, StepFailed
from tests.fakes import FakeEngine, FakeLazyTensor, fake_info
from tests.scheduling import assert_answers, batching, sequence
from tests.virtual_loop import run_virtual

MAX_TOKENS, MAX_SEQS, STEP_S = 48, 6, 0.004


@dataclass(frozen=True)
class Call:
    """A client: when it comes, with what, and when it loses patience."""

    at_s: float
    lengths: list[int]
    cancel_after_s: float | None
    deadline_s: float | None


@dataclass
class Ended:
    """How one call ended; ids are distinct over all calls and rise in the order of arrival."""

    first_id: int
    sequences: list[Int32]
    outcome: str


SHORT_S = st.floats(0.0, 0.03)
CALLS = st.lists(
    st.builds(
        Call,
        at_s=SHORT_S,
        lengths=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=12),
        cancel_after_s=st.one_of(st.none(), st.none(), SHORT_S),
        deadline_s=st.one_of(st.none(), st.none(), SHORT_S),
    ),
    min_size=1,
    max_size=14,
)
STEP_ENDS = st.lists(st.sampled_from(["ok", "ok", "ok", "fail", "oom", "raise", "raise oom"]), max_size=20)


class RandomEngine(FakeEngine):
    """Ends its steps as a list of words says; `OutOfMemoryError` also at launch."""

    def __init__(self, ends: list[str], dies_at_step: int | None) -> None:
        # Of every second kind of run, whatever else is random in it, large jobs are steps of their own.
        whole = MAX_TOKENS * (len(ends) % 2)
        info = fake_info(max_batch_tokens=MAX_TOKENS, max_batch_seqs=MAX_SEQS, whole_job_tokens=whole)
        super().__init__(info=info, service_s=lambda batch: STEP_S * (1 + batch.num_tokens / MAX_TOKENS))
        self._ends = list(ends)
        self._dies_at_step = dies_at_step
        self.offered: list[RaggedBatch] = []

    def behave(self) -> None:
        """End every later step well."""
        self._ends, self._dies_at_step = [], None

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        if len(self.offered) == self._dies_at_step:
            self.die()
        self.offered.append(batch)
        end = self._ends.pop(0) if self._ends else "ok"
        if end == "raise":
            self.raise_next(StepError("at launch"))
        elif end == "raise oom":
            self.raise_next(OutOfMemoryError("at launch"))
        else:
            errors: dict[str, EngineError] = {"fail": StepError("later"), "oom": OutOfMemoryError("later")}
            self.fail_next(errors.get(end))
        return super().step(batch)


async def play(batcher: Batcher, calls: list[Call]) -> list[Ended]:
    next_id = 0
    ended: list[Ended] = []

    async def client(call: Call) -> None:
        nonlocal next_id
        await asyncio.sleep(call.at_s)
        mine = Ended(next_id, [], "none")
        for length in call.lengths:
            mine.sequences.append(sequence(length, first=next_id))
            next_id += MAX_TOKENS
        ended.append(mine)
        try:
            async with asyncio.timeout(call.cancel_after_s):
                result = await batcher.run(mine.sequences, deadline_s=call.deadline_s)
            assert_answers(result, mine.sequences)
            mine.outcome = "result"
        except TimeoutError:
            mine.outcome = "cancelled"
        except SchedulerError as error:
            mine.outcome = type(error).__name__
            assert isinstance(error, DeadlineExpired | StepFailed | EngineDead | QueueFull)

    await asyncio.gather(*(client(call) for call in calls))
    return ended


def assert_in_order(offered: list[RaggedBatch], budget: int) -> None:
    """Sequences first reach the engine in the order of their arrival; what comes again is a retry.

    Of a half there are halves only where it is larger than batches of many jobs are.
    """
    batches: dict[int, list[RaggedBatch]] = {}
    for batch in offered:
        for start in batch.cu_seqlens[:-1]:
            batches.setdefault(int(batch.input_ids[start]), []).append(batch)
    assert list(batches) == sorted(batches)
    for mine in batches.values():
        assert all(after.num_seqs < before.num_seqs for before, after in pairwise(mine))
        assert all(half.num_tokens > budget for half in mine[1:-1])


def assert_counts(batcher: Batcher, ended: list[Ended], engine: RandomEngine) -> None:
    outcomes = [call.outcome for call in ended]
    assert "none" not in outcomes
    metrics = batcher.metrics
    assert metrics.accepted + metrics.refused_full + metrics.refused_closed == len(ended)
    assert metrics.accepted == metrics.completed + metrics.failed + metrics.expired + metrics.cancelled
    assert metrics.completed == outcomes.count("result")
    assert metrics.cancelled == outcomes.count("cancelled")
    assert metrics.expired == outcomes.count("DeadlineExpired")
    assert metrics.refused_full == outcomes.count("QueueFull")
    assert metrics.batches == len(engine.offered)
    assert (metrics.waiting_seqs, metrics.waiting_tokens) == (0, 0)


@settings(max_examples=150, deadline=None)
@given(
    calls=CALLS,
    ends=STEP_ENDS,
    dies_at_step=st.one_of(st.none(), st.none(), st.integers(0, 8)),
    max_in_flight=st.integers(1, 3),
    budget=st.integers(1, MAX_TOKENS),
    max_waiting_seqs=st.integers(4, 200),
)
def test_every_call_ends_once_and_every_limit_holds(
    calls: list[Call],
    ends: list[str],
    dies_at_step: int | None,
    max_in_flight: int,
    budget: int,
    max_waiting_seqs: int,
) -> None:
    engine = RandomEngine(ends, dies_at_step)
    dead: list[str] = []

    async def scenario() -> None:
        async with batching(
            engine,
            on_dead=dead.append,
            max_in_flight=max_in_flight,
            min_budget_tokens=1,
            max_budget_tokens=budget,
            max_waiting_seqs=max_waiting_seqs,
        ) as batcher:
            ended = await asyncio.wait_for(play(batcher, calls), 60.0)
            assert_counts(batcher, ended, engine)
            assert batcher.healthy == (not dead)
            if not dead:
                engine.behave()
                assert_answers(await batcher.run([sequence(2)]), [sequence(2)])

    run_virtual(scenario())
    assert engine.most_in_flight <= max_in_flight
    assert len(dead) <= 1
    for batch in engine.offered:
        assert batch.num_seqs <= MAX_SEQS
        assert batch.num_tokens <= MAX_TOKENS


@settings(max_examples=60, deadline=None)
@given(calls=CALLS, ends=STEP_ENDS, budget=st.integers(1, MAX_TOKENS))
@example(
    calls=[Call(0.0, [1, 25, 24], None, None), Call(0.0, [1, 1, 1], None, None)],
    ends=["ok", "ok", "ok", "oom", "ok", "oom", "ok"],
    budget=1,
)
def test_no_sequence_overtakes_an_earlier_one(calls: list[Call], ends: list[str], budget: int) -> None:
    engine = RandomEngine(ends, None)

    async def scenario() -> None:
        async with batching(engine, min_budget_tokens=1, max_budget_tokens=budget) as batcher:
            await asyncio.wait_for(play(batcher, calls), 60.0)

    run_virtual(scenario())
    assert_in_order(engine.offered, budget)
