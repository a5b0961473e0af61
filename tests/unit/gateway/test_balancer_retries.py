"""The balancer when a replica fails, is full or pauses: what runs again, where, and when; in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.errors import ErrorKind, from_exception
from gateway.replicas.errors import Busy, Expired, Lost, NotSent, Rejected, ReplicaError, Unavailable
from gateway.replicas.replica import MAX_FAILURES, State
from scheduler.errors import (
    DeadlineExpired,
    NoReplica,
    SchedulerError,
    StepFailed,
    StepOutOfMemory,
)
from tests.balancing import Bench, ask, sequences, virtual
from tests.virtual_loop import run_virtual

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize("error", [Lost("gone"), NotSent("refused"), Unavailable("loading", 0.5)])
@virtual
async def test_what_one_replica_fails_with_another_does(error: ReplicaError) -> None:
    bench = Bench(2)
    bench.remotes[0].script.extend([error] * 100)
    for number in range(10):
        assert await ask(bench, sequences(5, first=number)) == [None]
    assert bench.replicas[0].failures >= 1
    assert bench.remotes[1].took
    bench.assert_idle()


@virtual
async def test_two_failures_end_a_job_and_a_third_replica_is_not_asked() -> None:
    bench = Bench(3)
    for remote in bench.remotes:
        remote.script.append(Lost("gone"))
    (error,) = await ask(bench, sequences(5))
    assert isinstance(error, NoReplica)
    assert "gone" in str(error)
    assert sum(len(remote.took) for remote in bench.remotes) == 2
    told = from_exception(error)
    assert told.kind is ErrorKind.UNAVAILABLE
    assert dict(told.headers).keys() == {"Retry-After", "retry-after-ms"}


@virtual
async def test_a_connection_that_was_refused_is_no_attempt() -> None:
    bench = Bench(4)
    for remote in bench.remotes[:3]:
        remote.script.append(NotSent("refused"))
    for _ in range(4):
        assert await ask(bench, sequences(5)) == [None]
    assert [replica.state for replica in bench.replicas[:3]] == [State.EJECTED] * 3


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Rejected("no such id"), StepFailed),
        (Expired("late"), DeadlineExpired),
        (RuntimeError("a defect"), StepFailed),
    ],
)
@virtual
async def test_what_is_the_chunk_s_own_fault_is_tried_once(
    error: Exception, outcome: type[SchedulerError]
) -> None:
    bench = Bench(2)
    for remote in bench.remotes:
        remote.script.extend([error] * 9)
    for number in range(2 * MAX_FAILURES):
        (ended,) = await ask(bench, sequences(5, first=number), deadline_s=9.0)
        assert type(ended) is outcome
    assert sum(len(remote.took) for remote in bench.remotes) == 2 * MAX_FAILURES
    assert all(replica.in_service for replica in bench.replicas)
    bench.assert_idle()


@virtual
async def test_too_little_memory_is_tried_elsewhere_and_is_no_failure_of_the_replica() -> None:
    bench = Bench(2)
    for remote in bench.remotes:
        remote.script.append(Unavailable("out of memory", 0.001, out_of_memory=True))
    (error,) = await ask(bench, sequences(5))
    assert type(error) is StepOutOfMemory
    assert [replica.failures for replica in bench.replicas] == [0, 0]


@virtual
async def test_no_retry_once_the_deadline_has_passed() -> None:
    bench = Bench(2)
    for remote in bench.remotes:
        remote.s_a_token = 0.1
        remote.script.append(Lost("gone"))
    (error,) = await ask(bench, sequences(1), deadline_s=0.5)  # which takes a second
    assert type(error) is DeadlineExpired
    assert sum(len(remote.took) for remote in bench.remotes) == 1


@virtual
async def test_the_deadline_goes_along_and_ends_what_still_waits() -> None:
    bench = Bench(1)
    bench.remotes[0].s_a_token = 1e-3
    ended = await ask(bench, *[sequences(400, first=n) for n in range(5)], deadline_s=6.0)
    assert ended[0] is None
    assert type(ended[-1]) is DeadlineExpired
    assert all(left is not None and 0 < left <= 6.0 for left in bench.remotes[0].left_s)
    assert asyncio.get_running_loop().time() < 14
    await asyncio.sleep(20)
    bench.assert_idle()


@virtual
async def test_retry_after_is_honoured() -> None:
    bench = Bench(1)
    bench.remotes[0].script.append(Busy("full", 2.5))
    assert await ask(bench, sequences(5)) == [None]
    assert asyncio.get_running_loop().time() == pytest.approx(2.5, abs=0.01)
    assert bench.replicas[0].failures == 0


def test_a_pause_that_ends_between_two_looks_at_the_clock_leaves_nobody_waiting() -> None:
    """The loop's clock stands still in a turn, ours does not: timers end a little before or after a pause."""

    async def scenario(seed: int) -> None:
        bench, loop, rng = Bench(1), asyncio.get_running_loop(), random.Random(seed)
        ahead_s, at_s = 0.0, 0.0

        def clock() -> float:
            nonlocal ahead_s, at_s
            ahead_s = rng.uniform(-5e-6, 0.0) if loop.time() > at_s else ahead_s + rng.uniform(0.0, 2e-6)
            at_s = loop.time()
            return at_s + ahead_s

        bench.balancer._clock = clock
        bench.remotes[0].script.append(Busy("full", 0.5))
        assert await ask(bench, sequences(5)) == [None]

    for seed in range(300):
        run_virtual(scenario(seed))  # a deadlock there is an error
