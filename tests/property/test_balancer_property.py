"""Random jobs over random replicas, in virtual time: each has one outcome, and its rows in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.errors import Busy, Expired, Lost, NotSent, Rejected, Unavailable
from scheduler.errors import DeadlineExpired, Draining, NoReplica, QueueFull, SchedulerError, StepFailed
from tests.balancing import Bench
from tests.scheduling import assert_answers, sequence
from tests.virtual_loop import run_virtual

pytestmark = pytest.mark.timeout(100)

SHORT_S = st.floats(0.0, 0.05)
MAYBE_S = st.one_of(st.none(), st.none(), SHORT_S)
STEPS: dict[str, Callable[[], Exception | None]] = {
    "ok": lambda: None,
    "lost": lambda: Lost("gone"),
    "refused": lambda: NotSent("refused"),
    "unavailable": lambda: Unavailable("draining", 0.01),
    "memory": lambda: Unavailable("memory", 0.0, out_of_memory=True),
    "busy": lambda: Busy("full", 0.005),
    "rejected": lambda: Rejected("bad"),
    "expired": lambda: Expired("late"),
    "defect": lambda: RuntimeError("a defect"),
}
# What happens to replicas meanwhile.
EVENTS = ("admit", "eject", "leave", "hang", "pause")


@dataclass(frozen=True)
class Call:
    """A client: when it comes, with what, and when it loses patience."""

    at_s: float
    lengths: list[int]
    cancel_after_s: float | None
    deadline_s: float | None


CALLS = st.lists(
    st.builds(Call, SHORT_S, st.lists(st.integers(1, 300), min_size=1, max_size=60), MAYBE_S, MAYBE_S),
    min_size=1,
    max_size=10,
)
SCRIPT = st.lists(st.sampled_from(["ok", "ok", "ok", *STEPS]), max_size=12)
REMOTES = st.lists(st.tuples(st.sampled_from([1e-6, 1e-5, 1e-4]), SCRIPT), min_size=1, max_size=4)
CHANGES = st.lists(st.tuples(SHORT_S, st.integers(0, 3), st.sampled_from(EVENTS)), max_size=8)


@settings(max_examples=100, deadline=None)
@given(calls=CALLS, remotes=REMOTES, changes=CHANGES, closes_s=MAYBE_S, seed=st.integers(0, 99))
def test_every_job_has_one_outcome_and_rows_in_order(
    calls: list[Call],
    remotes: list[tuple[float, list[str]]],
    changes: list[tuple[float, int, str]],
    closes_s: float | None,
    seed: int,
) -> None:
    async def scenario() -> None:
        bench = Bench(len(remotes), seed=seed, max_waiting_tokens=30_000)
        for remote, (s_a_token, script) in zip(bench.remotes, remotes, strict=True):
            remote.s_a_token = s_a_token
            remote.script.extend(STEPS[step]() for step in script)
        outcomes: list[str] = []

        async def client(number: int, call: Call) -> None:
            await asyncio.sleep(call.at_s)
            job = [sequence(n, first=1000 * number + index) for index, n in enumerate(call.lengths)]
            try:
                async with asyncio.timeout(call.cancel_after_s):
                    result = await bench.balancer.run(job, deadline_s=call.deadline_s)
                assert_answers(result, job)
                outcomes.append("result")
            except TimeoutError:
                outcomes.append("cancelled")
            except SchedulerError as error:
                known = DeadlineExpired | Draining | NoReplica | QueueFull | StepFailed
                assert isinstance(error, known)
                outcomes.append(type(error).__name__)

        async def change(at_s: float, number: int, event: str) -> None:
            await asyncio.sleep(at_s)
            replica = bench.replicas[number % len(bench.replicas)]
            if event == "admit":
                replica.admit(0.0)
            elif event == "eject":
                replica.eject("probe")
            elif event == "leave":
                replica.leave()
            elif event == "hang":
                replica.eject("silent")
                bench.balancer.give_up(replica, "silent")
            else:
                replica.pause(0.01, asyncio.get_running_loop().time())

        async def close() -> None:
            if closes_s is not None:
                await asyncio.sleep(closes_s)
                await bench.balancer.close(0.01)

        async with asyncio.timeout(60):
            await asyncio.gather(
                close(),
                *(client(*item) for item in enumerate(calls)),
                *(change(*item) for item in changes),
            )
        await asyncio.sleep(1)
        assert len(outcomes) == len(calls)
        bench.assert_idle()
        metrics = bench.balancer.metrics
        assert metrics.accepted + metrics.refused_full + metrics.refused_closed == len(calls)
        assert metrics.accepted == metrics.completed + metrics.failed + metrics.expired + metrics.cancelled
        assert metrics.completed == outcomes.count("result")

    run_virtual(scenario())
