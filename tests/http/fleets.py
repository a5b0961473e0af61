"""A fleet of replicas over real servers on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gateway.balancer import Balancer
from gateway.replicas import fleet as fleet_module
from gateway.replicas import member
from gateway.replicas.fleet import Fleet
from gateway.replicas.options import ReplicaOptions
from gateway.replicas.replica import Replica
from scheduler.options import SchedulerOptions
from tests.http.served import Served, expected, until

if TYPE_CHECKING:
    from gateway.tracing import Tracing

NO_WISH: dict[str, object] = {}


class Fleeting:
    """A started fleet."""

    def __init__(self, fleet: Fleet, balancer: Balancer) -> None:
        self.fleet, self.balancer = fleet, balancer

    @property
    def states(self) -> list[str]:
        return [replica.state.value for replica in self.fleet.replicas]

    def replica(self, server: Served) -> Replica:
        return next(replica for replica in self.fleet.replicas if replica.name == server.url)

    async def work(self, count: int = 40) -> None:
        """Some jobs, each right."""
        for number in range(count):
            ids = np.array([number, 7], np.int32)
            result = await self.balancer.run([ids])
            np.testing.assert_allclose(result.vectors[0], expected(ids, normalize=False), rtol=1e-6)


@asynccontextmanager
async def fleet(
    *servers: Served,
    wanted: dict[str, object] = NO_WISH,
    file: Path | None = None,
    key: str | None = None,
    urls: tuple[str, ...] = (),
    tracing: Tracing | None = None,
    **scheduling: Any,
) -> AsyncIterator[Fleeting]:
    """A fleet of these servers that looks often, ended with the block."""
    options = ReplicaOptions((*urls, *(server.url for server in servers)), file, key=key)
    started = Fleet(options, SchedulerOptions(**scheduling), wanted, tracing=tracing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "LOOK_S", 0.02)
        for name, seconds in (("CHECK_S", 0.05), ("FIRST_PROBE_S", 0.02), ("LAST_PROBE_S", 0.05)):
            patch.setattr(member, name, seconds)
        try:
            yield Fleeting(started, await started.start())
        finally:
            await started.close(1.0)


async def settled(fleeting: Fleeting, *states: str) -> None:
    """Wait until its replicas are in these states, in their order."""
    await until(lambda: fleeting.states == list(states))
