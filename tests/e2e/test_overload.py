"""More than the server can do: it serves as much as ever, and refuses the rest at once.

The engine takes 8 sequences in 20 ms, so that 400 requests a second are all there is. Server and client have
a core each, where there are two.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from tests.attempts import best_of, in_time
from tests.e2e.fake_server import STEP_S
from tests.e2e.open_loop import OpenLoop, Outcome
from tests.e2e.server_process import FAKE, ServerProcess

pytestmark = [pytest.mark.timed, pytest.mark.timeout(400)]

CAPACITY, BATCH, WAITING = 400.0, 8, 200
GROWTH_BYTES = 50e6
IDS = [5, 6, 7]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    flags = ("--load-format", "dummy", "--port", "0", "--max-batch-seqs", str(BATCH))
    limits = ("--max-waiting-seqs", str(WAITING))
    with ServerProcess(*flags, *limits, program=FAKE, env={STEP_S: str(BATCH / CAPACITY)}) as process:
        process.ready()
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, cores[:1])
        os.sched_setaffinity(0, cores[-1:])
        gc.collect()
        gc.freeze()  # a collection of what all tests keep holds the client for 20 ms
        yield process
        gc.unfreeze()
        os.sched_setaffinity(0, cores)


def rss_bytes(pid: int) -> int:
    (line,) = (it for it in Path(f"/proc/{pid}/status").read_text().splitlines() if it.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def measure(server: ServerProcess, factor: float, seconds: float) -> tuple[Outcome, ...]:
    """Normal load, as much as there is, too much, and normal load again: from 1 s to 2 s after its end."""
    client = OpenLoop(urlsplit(server.url).port or 0)
    before = await client.run(CAPACITY / 2, 1.0, IDS)
    peak = await client.run(CAPACITY, max(1.5, seconds / 6), IDS)
    rss = rss_bytes(server.pid)
    overload = await client.run(factor * CAPACITY, seconds, IDS)
    ended_s = time.monotonic()
    grown = rss_bytes(server.pid) - rss
    await client.run(CAPACITY / 2, max(0.1, 1.0 - (time.monotonic() - ended_s)), IDS)
    after = await client.run(CAPACITY / 2, 1.0, IDS)
    client.close()
    print(f"{factor:g} x {CAPACITY:g} a second for {seconds:g} s: before: {before}")
    print(f"  peak: {peak}\n  overload: {overload}\n  after: {after}\n  grown by {grown / 1e6:.1f} MB")
    assert grown < GROWTH_BYTES
    return before, peak, overload, after


def assert_holds(before: Outcome, peak: Outcome, overload: Outcome, after: Outcome) -> None:
    assert set(overload.taken_s) == {200, 429}
    assert not overload.errors
    assert overload.without_retry_after == 0
    assert set(after.taken_s) == {200}
    in_time(overload.goodput >= 0.9 * peak.goodput, overload.goodput, peak.goodput)
    times_s = [outcome.quantile_s(200, 0.5) for outcome in (before, after)]
    in_time(times_s[1] < 1.5 * times_s[0], times_s)


@pytest.mark.parametrize("factor", [5.0, pytest.param(2.0, marks=pytest.mark.long)])
@best_of(3)
def test_seconds_of_overload(server: ServerProcess, factor: float) -> None:
    """Refusals are timed by the server: others may have the client's core."""
    outcomes = uvloop.run(measure(server, factor, 2.0))
    assert_holds(*outcomes)
    told_ms = sorted(outcomes[2].told_ms[429])
    in_time(told_ms[int(0.99 * len(told_ms))] < 5.0, told_ms[-5:])


@pytest.mark.long
@pytest.mark.parametrize("factor", [2.0, 5.0])
def test_a_minute_of_overload(server: ServerProcess, factor: float) -> None:
    """Refusals are timed by the client. For an idle machine."""
    outcomes = uvloop.run(measure(server, factor, 60.0))
    assert_holds(*outcomes)
    assert outcomes[2].quantile_s(429, 0.99) < 0.005
