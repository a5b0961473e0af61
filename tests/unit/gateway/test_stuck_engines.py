"""An engine of our own that hangs as a whole, watchdog and all, is killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.replicas import member, processes
from gateway.replicas.errors import Lost, NotSent
from gateway.replicas.member import Member
from gateway.replicas.pace import ChunkTimes
from gateway.replicas.processes import ChildProcess
from gateway.replicas.replica import Replica

pytestmark = pytest.mark.timeout(30)


class Client:
    """Nothing comes back from it."""

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(("error", "stuck"), [(Lost("no answer"), True), (NotSent("nobody there"), False)])
async def test_silence_is_told_where_there_are_connections(
    monkeypatch: pytest.MonkeyPatch, error: Exception, stuck: bool
) -> None:
    for name, seconds in (("STUCK_S", 0.1), ("FIRST_PROBE_S", 0.01), ("LAST_PROBE_S", 0.01)):
        monkeypatch.setattr(member, name, seconds)
    told: list[bool] = []

    async def identify(_: Any) -> None:
        raise error

    client: Any = Client()
    replica = Replica("r", ChunkTimes(), lambda _: None)
    watch = Member(
        replica,
        client,
        identify=identify,
        admit=lambda _: None,
        give_up=lambda *_: None,
        stuck=lambda: told.append(True),
    )
    await asyncio.sleep(0.35)
    await watch.close()
    assert bool(told) is stuck
    assert len(told) <= 3


async def test_a_stopped_process_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "FIRST_BACK_OFF_S", 0.01)
    ended = asyncio.Event()
    command = (sys.executable, "-c", "import time; print('ready after 0 s', flush=True); time.sleep(60)")
    child = ChildProcess("e", command, tmp_path / "s", os.environ)
    serves = asyncio.Semaphore(0)
    child.on_ready, child.on_exit = serves.release, lambda _: ended.set()
    running = asyncio.create_task(child.run())
    await serves.acquire()
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    child.kill()
    await ended.wait()
    await serves.acquire()
    assert child.pid != first
    await child.stop(0.0)
    await running
