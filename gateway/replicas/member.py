"""One replica's watch: who it is, whether it is well, and when to look again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from gateway.replicas.client import ReplicaClient
from gateway.replicas.errors import Lost, NotSent, ReplicaError, Unavailable
from gateway.replicas.identity import Mismatch
from gateway.replicas.replica import Replica, State

# Between looks at a replica that serves, and at one that does not: these grow while it is unwell.
CHECK_S, FIRST_PROBE_S, LAST_PROBE_S = 2.0, 0.25, 5.0
# Looks without an answer, during which nothing came from it, until what is under way there is taken back.
MAX_SILENT = 2
# Without any answer for so long, though there are connections: it will not come back by itself. More than a
# step may take.
STUCK_S = 180.0


class Member:
    """Looks after one replica until `close`.

    identify: raises Mismatch if it serves something else. admit: lets it serve. give_up: ends its chunks.
    stuck: called when it takes connections and has answered nothing for STUCK_S.
    """

    def __init__(
        self,
        replica: Replica,
        client: ReplicaClient,
        *,
        identify: Callable[[ReplicaClient], Awaitable[None]],
        admit: Callable[[Replica], None],
        give_up: Callable[[Replica, str], None],
        stuck: Callable[[], None] = lambda: None,
    ) -> None:
        self.replica = replica
        self.client = client
        self._identify, self._admit, self._give_up, self._stuck = identify, admit, give_up, stuck
        self._heard_s = time.monotonic()
        self._wake = asyncio.Event()
        self._probes = self._silent = 0
        self._done_s = 0.0
        self._task = asyncio.get_running_loop().create_task(self._tend())

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    async def close(self) -> None:
        """Look no more, and end the connections once nothing is under way on them."""
        self._task.cancel()
        await asyncio.wait([self._task])
        while self.replica.outstanding_chunks:  # noqa: ASYNC110, replicas leave rarely
            await asyncio.sleep(0.1)
        await self.client.close()

    async def _tend(self) -> None:
        while True:
            self._wake.clear()
            pause_s = await (self._check() if self.replica.in_service else self._probe())
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _probe(self) -> float:
        """Ask one that does not serve; seconds until the next look."""
        lost = False
        try:
            await self._identify(self.client)
            await self.client.check()
        except Mismatch as error:
            self.replica.refuse(str(error))
        except ReplicaError as error:
            self.replica.eject(str(error))
            lost = isinstance(error, Lost)
        else:
            self._admit(self.replica)
        self._listen(lost=lost)
        pause_s = min(LAST_PROBE_S, FIRST_PROBE_S * 2.0**self._probes)
        self._probes = min(self._probes + 1, 10)
        return pause_s

    def _listen(self, *, lost: bool) -> None:
        now_s = time.monotonic()
        if not lost:
            self._heard_s = now_s
        elif now_s - self._heard_s > STUCK_S:
            self._heard_s = now_s
            self._stuck()

    async def _check(self) -> float:
        """Ask one that serves; seconds until the next look."""
        if self.replica.state is State.READY:
            self._probes = 0
        try:
            await self.client.check()
        except (NotSent, Unavailable) as error:
            self.replica.eject(str(error))
        except ReplicaError as error:
            self._hear_nothing(str(error))
        else:
            self._silent = 0
            self._heard_s = time.monotonic()
        return CHECK_S if self.replica.in_service else FIRST_PROBE_S

    def _hear_nothing(self, reason: str) -> None:
        if self._silent == 0 or self.replica.last_done_s > self._done_s:
            self._silent, self._done_s = 0, self.replica.last_done_s
        self._silent += 1
        if self._silent >= MAX_SILENT:
            self._silent = 0
            self.replica.eject(reason)
            self._give_up(self.replica, reason)
