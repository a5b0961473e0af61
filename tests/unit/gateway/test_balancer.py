"""The balancer over scripted replicas, in virtual time: what is split, where it goes, and how it ends."""

from __future__ import annotations

import asyncio
from math import inf

import numpy as np
import pytest

from gateway.replicas.chunks import MOST_TOKENS, Chunk
from gateway.replicas.errors import Lost
from gateway.replicas.replica import FIRST_WINDOW_TOKENS, MAX_FAILURES, MOST_WINDOW_TOKENS, State
from rose.batch import Int32, RaggedIds, TokenOutput
from scheduler.errors import (
    Draining,
    NoReplica,
    QueueFull,
)
from scheduler.job import Job, Run
from tests.balancing import Bench, ask, rows, sequences, virtual
from tests.fakes import fake_info
from tests.scheduling import sequence, turns

pytestmark = pytest.mark.timeout(20)


@virtual
async def test_2000_texts_over_three_replicas_come_back_in_order() -> None:
    bench = Bench(3)
    for times, remote in zip((1, 3, 2), bench.remotes, strict=True):
        remote.s_a_token *= times
    assert await ask(bench, [sequence(1 + n % 30, first=n) for n in range(2000)]) == [None]
    assert all(remote.took for remote in bench.remotes)
    assert max(chunk.num_tokens for remote in bench.remotes for chunk in remote.took) <= MOST_TOKENS
    bench.assert_idle()


@virtual
async def test_all_that_can_be_asked_of_an_engine_is_split_and_joined_alike() -> None:
    kinds: frozenset[TokenOutput] = frozenset(("lexical", "hidden"))
    info = fake_info(token_outputs={"lexical": 1, "hidden": 3})
    bench = Bench(3, info=info)
    job = sequences(300, 12)
    types: list[Int32 | None] = [None if n % 3 else np.full(12, n % 2, np.int32) for n in range(300)]
    spans: list[Int32 | None] = [
        None if n % 4 else np.array([[0, 5], [5, 12], [3, 3]], np.int32) for n in range(300)
    ]
    result = await bench.balancer.run(job, types, None, spans, kinds)
    future = asyncio.get_running_loop().create_future()
    whole = Job(RaggedIds.of(job), future, 0.0, inf, types, spans, kinds)
    wanted = rows(Chunk(Run(whole, 0, 300)), info)
    assert sum(len(remote.took) for remote in bench.remotes) >= 3
    np.testing.assert_array_equal(result.vectors, wanted.vectors)
    assert result.tokens.keys() == kinds
    for kind, values in result.tokens.items():
        np.testing.assert_array_equal(values, wanted.tokens[kind])


@virtual
async def test_a_small_job_is_not_torn_apart_and_a_long_sequence_goes_alone() -> None:
    bench = Bench(3)
    await ask(bench, sequences(8))
    assert sum(len(remote.took) for remote in bench.remotes) == 1
    await ask(bench, [sequence(4000), sequence(4000), sequence(10)])
    assert sum(len(remote.took) for remote in bench.remotes) == 4


@virtual
async def test_one_client_s_requests_are_spread_evenly_whatever_their_size() -> None:
    bench = Bench(3)
    for number in range(300):
        await ask(bench, sequences(1 + number % 7, 1 + 40 * (number % 5)))
    tokens = [remote.tokens for remote in bench.remotes]
    assert max(tokens) < 1.2 * sum(tokens) / 3
    assert min(tokens) > 0.8 * sum(tokens) / 3


@pytest.mark.parametrize("clients", [1, 2, 8, 64])
@virtual
async def test_a_replica_that_is_ten_times_slower_gets_less_than_15_percent(clients: int) -> None:
    bench = Bench(3)
    bench.remotes[2].s_a_token *= 10

    async def client() -> None:
        for _ in range(40 if clients < 10 else 8):
            assert await ask(bench, sequences(20, 50)) == [None]

    await asyncio.gather(*(client() for _ in range(clients)))
    tokens = [remote.tokens for remote in bench.remotes]
    assert tokens[2] < 0.15 * sum(tokens)
    assert abs(tokens[0] - tokens[1]) < 0.2 * sum(tokens)


@virtual
async def test_one_that_was_slow_is_found_fast_again() -> None:
    bench = Bench(2)
    bench.remotes[1].s_a_token *= 10
    for _ in range(50):
        await ask(bench, sequences(20, 50))
    bench.remotes[1].s_a_token /= 10
    before = bench.remotes[1].tokens
    for _ in range(400):
        await ask(bench, sequences(20, 50))
        await asyncio.sleep(0.2)
    assert bench.remotes[1].tokens - before > 0.3 * 400 * 1000


@virtual
async def test_what_waits_waits_here() -> None:
    """No replica has more under way than it does in a quarter of a second, once that is known."""
    bench = Bench(2)
    for remote in bench.remotes:
        remote.s_a_token = 1e-4  # 10 000 tokens a second
    jobs = [sequences(100, 50, first=n) for n in range(12)]
    assert await ask(bench, *jobs) == [None] * 12
    assert max(remote.most_outstanding for remote in bench.remotes) <= FIRST_WINDOW_TOKENS
    for remote in bench.remotes:
        remote.most_outstanding = 0
    assert await ask(bench, *jobs) == [None] * 12
    assert max(remote.most_outstanding for remote in bench.remotes) <= MOST_TOKENS
    assert all(replica.window_tokens < MOST_WINDOW_TOKENS for replica in bench.replicas)


@virtual
async def test_more_than_may_wait_is_refused_with_the_time_it_would_take() -> None:
    bench = Bench(1, max_waiting_tokens=20_000)
    bench.remotes[0].s_a_token = 1e-4
    await ask(bench, sequences(100, 50))
    ended = await ask(bench, *[sequences(100, 50, first=n) for n in range(20)])
    refused = [error for error in ended if error is not None]
    assert 0 < len(refused) < 20
    assert {type(error) for error in refused} == {QueueFull}
    assert all(0 < error.retry_after_s < 10 for error in refused)
    bench.assert_idle()


@virtual
async def test_a_client_that_leaves_takes_its_chunks_along() -> None:
    bench = Bench(2)
    for remote in bench.remotes:
        remote.script.extend(["hang"] * 99)
    calls = [asyncio.create_task(bench.balancer.run(sequences(2000))) for _ in range(3)]
    await asyncio.sleep(0.1)
    began = sum(len(remote.took) for remote in bench.remotes)
    assert began and bench.balancer.metrics.waiting_seqs
    for call in calls:
        call.cancel()
    await turns()
    assert sum(remote.cancelled for remote in bench.remotes) == began
    bench.assert_idle()
    assert bench.balancer.metrics.cancelled == 3


@virtual
async def test_a_call_that_is_cancelled_before_it_is_sent_leaves_nothing() -> None:
    bench = Bench(2)
    call = asyncio.create_task(bench.balancer.run(sequences(5)))
    await asyncio.sleep(0)
    call.cancel()
    await turns()
    bench.assert_idle()
    assert await ask(bench, sequences(5)) == [None]


@virtual
async def test_when_the_last_replica_goes_what_waits_ends_at_once_and_new_work_is_refused() -> None:
    bench = Bench(1)
    bench.remotes[0].script.extend([Lost("gone")] * 99)
    bench.remotes[0].s_a_token = 1e-3
    ended = await ask(bench, *[sequences(400, first=n) for n in range(6)])
    assert {type(error) for error in ended} == {NoReplica}
    assert len(bench.remotes[0].took) < 20  # what had been sent; 42 chunks in all
    assert not bench.balancer.ready
    (error,) = await ask(bench, sequences(1))
    assert type(error) is NoReplica
    assert "no replica serves (r0: gone)" in str(error)
    bench.assert_idle()
    metrics = bench.balancer.metrics
    assert metrics.accepted == metrics.failed == 6
    assert metrics.refused_closed == 1


@virtual
async def test_after_failures_in_a_row_a_replica_is_tried_with_one_chunk() -> None:
    bench = Bench(1)
    (replica,), (remote,) = bench.replicas, bench.remotes
    remote.script.extend([Lost("gone")] * MAX_FAILURES)
    while replica.in_service:
        await ask(bench, sequences(1))
    assert (replica.state, replica.reason, replica.ejections) == (State.EJECTED, "gone", 1)
    replica.admit(0.0)
    assert replica.state is State.HALF_OPEN
    remote.script.append("hang")
    calls = [asyncio.create_task(bench.balancer.run(sequences(1, first=n))) for n in range(5)]
    sent = len(remote.took)
    await asyncio.sleep(1)
    assert len(remote.took) == sent + 1
    bench.balancer.give_up(replica, "no answer")  # counts as a failure: once is enough now
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(error) for error in ended} == {NoReplica}
    assert replica.state is State.EJECTED
    replica.admit(0.0)
    assert await ask(bench, sequences(1)) == [None]
    assert replica.state is State.READY
    bench.assert_idle()


@virtual
async def test_what_hangs_at_one_replica_is_taken_back_and_runs_elsewhere() -> None:
    bench = Bench(2)
    bench.remotes[0].script.append("hang")
    calls = [asyncio.create_task(ask(bench, sequences(5, first=n))) for n in range(4)]
    await asyncio.sleep(5)
    bench.replicas[0].eject("no answer")
    bench.balancer.give_up(bench.replicas[0], "no answer")
    assert await asyncio.gather(*calls) == [[None]] * 4
    bench.assert_idle()


@virtual
async def test_closing_gives_the_accepted_their_time_and_refuses_others() -> None:
    bench = Bench(1)
    remote = bench.remotes[0]
    remote.s_a_token = 1e-3
    quick = asyncio.create_task(ask(bench, sequences(10)))
    await turns()
    remote.script.append("hang")
    stuck = asyncio.create_task(ask(bench, sequences(10)))
    await turns()
    closing = asyncio.create_task(bench.balancer.close(5.0))
    await turns()
    assert type((await ask(bench, sequences(1)))[0]) is Draining
    await closing
    assert await quick == [None]
    assert type((await stuck)[0]) is Draining
    assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.1)
    bench.assert_idle()


@virtual
async def test_a_replica_that_leaves_the_list_finishes_what_it_has_and_gets_no_more() -> None:
    bench = Bench(2)
    leaving = bench.remotes[0]
    calls = [asyncio.create_task(ask(bench, sequences(100, first=n))) for n in range(10)]
    await turns()
    sent = len(leaving.took)
    assert sent
    leaving.replica.leave()
    assert await asyncio.gather(*calls) == [[None]] * 10
    assert (len(leaving.took), leaving.cancelled) == (sent, 0)
