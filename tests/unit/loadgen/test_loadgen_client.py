"""One client in this process, against the echo server in the same loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from loadgen.client import Client, Job
from loadgen.echo import EchoProtocol
from loadgen.plan import LoadgenError, Pacing, Shape, Source, Stream, Target
from tests.attempts import best_of, in_time

SHAPE = Shape(2, 8, 8)


@pytest.fixture
async def job() -> AsyncIterator[Job]:
    server = await asyncio.get_running_loop().create_server(EchoProtocol, "127.0.0.1", 0)
    target = Target("A", "127.0.0.1", server.sockets[0].getsockname()[1], "bouquet-msgpack")
    source = Source(30_000)
    yield Job(target, Stream(SHAPE), source, index=0, open_s=0.5, max_run_s=5.0, timeout_s=5.0)
    server.close()


@best_of(3)
async def test_a_late_send_keeps_the_time_at_which_it_was_due(job: Job) -> None:
    """This process stands still for 0.1 s: what was due meanwhile is sent late, but was due all the same."""
    client = Client(replace(job, stream=Stream(SHAPE, pacing=Pacing.CONSTANT, rate=100.0)))
    await client.prepare()
    start_s = perf_counter() + 0.05
    loop = asyncio.get_running_loop()
    loop.call_later(0.25, time.sleep, 0.1)
    recording = await client.run(start_s)
    due_s = np.sort(recording.intended_s) - start_s
    assert due_s == pytest.approx(np.arange(51) / 100.0)
    late_s = recording.sent_s - recording.intended_s
    assert late_s.max() > 0.07 and (late_s > 0.05).sum() >= 4
    in_time(late_s.max() < 0.5, late_s.max())
    assert (recording.done_s > recording.sent_s).all() and late_s.min() >= 0.0


@best_of(3)
async def test_a_closed_loop_keeps_its_number_in_flight_until_it_is_stopped(job: Job) -> None:
    client = Client(replace(job, stream=Stream(SHAPE, in_flight=3)))
    await client.prepare()
    asyncio.get_running_loop().call_later(0.2, client.stop)
    recording = await client.run(perf_counter())
    assert recording.errors == ()
    in_time(len(recording.done_s) > 10, len(recording.done_s))
    # The third from now is sent after this one is done, and not before.
    order = np.argsort(recording.sent_s)
    sent_s, done_s = recording.sent_s[order], np.sort(recording.done_s)
    assert (sent_s[3:] >= done_s[:-3]).all()
    assert recording.sequences.tolist() == [2] * 64 and recording.tokens.tolist() == [16] * 64
    assert recording.beats[-1].done == len(recording.done_s)


@best_of(3)
async def test_a_run_ends_by_itself(job: Job) -> None:
    client = Client(replace(job, max_run_s=0.2))
    await client.prepare()
    begun_s = perf_counter()
    await client.run(begun_s)
    taken_s = perf_counter() - begun_s
    assert taken_s > 0.15
    in_time(taken_s < 3.0, taken_s)


async def test_a_server_of_another_api_is_named(job: Job) -> None:
    client = Client(replace(job, target=replace(job.target, api="tei")))
    # The echo server knows TEI's path, so ask for a format at a path that it answers otherwise.
    client._api = replace(client._api, path="/v1/embeddings")
    with pytest.raises(LoadgenError, match="the server answers 400"):
        await client.prepare()


@pytest.mark.parametrize("polls", [True, False])
async def test_a_client_that_polls_does_not_sleep(
    job: Job, polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(replace(job, stream=Stream(SHAPE, polls=polls)))
    await client.prepare()
    loop = asyncio.get_running_loop()
    waits: list[float | None] = []
    select = loop._selector.select

    def note(timeout: float | None) -> object:
        waits.append(timeout)
        return select(timeout)

    loop.call_later(0.1, client.stop)
    monkeypatch.setattr(loop._selector, "select", note)
    recording = await client.run(perf_counter())
    monkeypatch.undo()
    assert recording.errors == () and len(recording.done_s) > 0
    # One or two turns go by before the first answer is waited for, and after the last.
    assert all(wait == 0 for wait in waits[3:]) == polls
    assert len(waits) > 5


async def test_what_a_client_cannot_send_is_passed_over_not_sent_later(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of a trace that met the limit of requests under way: the others are still their own."""
    monkeypatch.setattr("loadgen.client.MAX_OPEN", 0)
    client = Client(replace(job, stream=Stream(SHAPE, pacing=Pacing.CONSTANT, rate=100.0)))
    await client.prepare()
    recording = await client.run(perf_counter())
    assert len(recording.done_s) == 0
    assert client._next == 51
