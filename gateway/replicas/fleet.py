"""All replicas: those that are listed, those that we started; looked after, and behind one balancer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.balancer import Balancer
from gateway.replicas.chunks import Chunk
from gateway.replicas.client import ReplicaClient
from gateway.replicas.endpoints import Endpoint, Listing
from gateway.replicas.identity import check
from gateway.replicas.member import Member
from gateway.replicas.options import ReplicaOptions
from gateway.replicas.pace import ChunkTimes
from gateway.replicas.processes import ChildProcess
from gateway.replicas.replica import Replica, State
from rose.batch import BatchResult, EngineInfo
from scheduler.options import SchedulerOptions

if TYPE_CHECKING:
    from gateway.tracing import Tracing

log = logging.getLogger(__name__)

# Between looks at the file, and at what names mean.
LOOK_S = 2.0


class Fleet:
    """Begins with `start`, which gives the balancer.

    wanted: what the model's own files say of it; see `identity.check`. children: processes to run.
    tracing: None: no traces.
    """

    def __init__(
        self,
        options: ReplicaOptions,
        scheduling: SchedulerOptions,
        wanted: Mapping[str, object],
        children: Sequence[ChildProcess] = (),
        tracing: Tracing | None = None,
    ) -> None:
        self._options = options
        self._scheduling = scheduling
        self._wanted = wanted
        self._children = children
        self._tracing = tracing
        self._listing = Listing(options.urls, options.file)
        self._members: dict[Endpoint, Member] = {}
        self._nowhere: dict[str, Replica] = {}
        self._times = ChunkTimes()
        self._clients: dict[Replica, ReplicaClient] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._running: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._balancer: Balancer | None = None
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether any replica serves."""
        return any(member.replica.in_service for member in self._members.values())

    @property
    def info(self) -> EngineInfo:
        """Of the model that they serve; once one of them did.

        Raises:
            RuntimeError: none did yet.
        """
        if self._info is None:
            raise RuntimeError("no replica has been found yet")
        return self._info

    @property
    def replicas(self) -> list[Replica]:
        """Those that are listed now; one whose name has no address, too."""
        return [*(member.replica for member in self._members.values()), *self._nowhere.values()]

    async def start(self) -> Balancer:
        """Look for replicas; done when all children serve, and without children when the first replica does.

        Raises:
            ChildFailed: a child cannot start.
        """
        loop = asyncio.get_running_loop()
        for child in self._children:
            self._running.append(loop.create_task(child.run()))
            self._add(child.endpoint, child.kill)
            child.on_ready = self._members[child.endpoint].wake
            child.on_exit = self._left_us(self._members[child.endpoint])
        self._following = loop.create_task(self._follow())
        serving = loop.create_task(self._serving())
        awaited: list[asyncio.Future[Any]] = [serving, *(child.failed for child in self._children)]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for child in self._children:
                if child.failed.done():
                    child.failed.result()
            return await serving
        finally:
            serving.cancel()

    def describe(self) -> list[dict[str, object]]:
        """What /info says of each."""
        return [
            {
                "name": replica.name,
                "state": replica.state.value,
                "reason": replica.reason,
                "outstanding_tokens": replica.outstanding_tokens,
                "window_tokens": replica.window_tokens,
                "tokens_per_s": round(replica.tokens_per_s),
                "tokens": replica.tokens,
                "chunks": replica.chunks,
                "failures": replica.failures,
            }
            for replica in self.replicas
        ]

    async def close(self, limit_s: float) -> None:
        """End the connections, and have the children finish within `limit_s` seconds."""
        if self._following is not None:
            self._following.cancel()
        closing = [member.close() for member in self._members.values()]
        stopping = [child.stop(limit_s) for child in self._children]
        await asyncio.gather(*closing, *stopping, *self._leaving)
        for task in self._running:
            task.cancel()

    async def _serving(self) -> Balancer:
        children = {child.endpoint for child in self._children}
        while True:
            waited = [m.replica for e, m in self._members.items() if e in children or not children]
            found = [replica.in_service for replica in waited]
            if found and (all(found) if children else any(found)) and self._balancer is not None:
                return self._balancer
            self._changed.clear()
            await self._changed.wait()

    async def _follow(self) -> None:
        """Follow the lists for ever."""
        while True:
            listed = await self._listing.read()
            children = {child.endpoint for child in self._children}
            for endpoint in self._members.keys() - listed - children:
                self._remove(endpoint)
            for endpoint in sorted(listed - self._members.keys(), key=lambda endpoint: endpoint.name):
                self._add(endpoint)
            self._show(self._listing.nowhere)
            await asyncio.sleep(LOOK_S)

    def _show(self, nowhere: Mapping[str, str]) -> None:
        """Have a replica that never serves for each URL without an address: there is nobody to ask."""
        before = self._nowhere
        self._nowhere = {
            url: before.get(url) or Replica(url, self._times, self._state_changed) for url in nowhere
        }
        for url, replica in self._nowhere.items():
            replica.eject(nowhere[url])
        if self._nowhere.keys() != before.keys():
            self._list_again()

    def _add(self, endpoint: Endpoint, stuck: Callable[[], None] = lambda: None) -> None:
        replica = Replica(endpoint.name, self._times, self._state_changed)
        key = None if endpoint.uds is not None else self._options.key
        carried = dict if self._tracing is None else self._tracing.carried
        client = ReplicaClient(endpoint, key, self._scheduling.step_timeout_s, carried)
        self._clients[replica] = client
        self._members[endpoint] = Member(
            replica, client, identify=self._identify, admit=self._admit, give_up=self._give_up, stuck=stuck
        )
        self._list_again()

    def _remove(self, endpoint: Endpoint) -> None:
        member = self._members.pop(endpoint)
        member.replica.leave()
        del self._clients[member.replica]
        self._list_again()
        task = asyncio.get_running_loop().create_task(member.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _list_again(self) -> None:
        if self._balancer is not None:
            self._balancer.replicas[:] = self.replicas
            self._balancer.changed()
        self._changed.set()

    async def _identify(self, client: ReplicaClient) -> None:
        """Take the first replica's word for what the model's files do not say; others must agree with it."""
        info = check(await client.describe(), self._wanted, self._info)
        if self._info is None:
            self._info = info

    def _admit(self, replica: Replica) -> None:
        if self._info is not None and self._balancer is None:
            send = self._send if self._tracing is None else self._tracing.sending(self._send)
            self._balancer = Balancer(self._info, self._scheduling, send)
            self._balancer.replicas[:] = self.replicas
        now_s = time.monotonic()
        replica.admit(max((other.given(now_s) for other in self.replicas if other.in_service), default=0.0))

    def _give_up(self, replica: Replica, reason: str) -> None:
        if self._balancer is not None:
            self._balancer.give_up(replica, reason)

    async def _send(self, replica: Replica, chunk: Chunk, left_s: float | None) -> BatchResult:
        return await self._clients[replica].run(chunk, left_s, self.info)

    def _state_changed(self, replica: Replica) -> None:
        well = replica.in_service or replica.state is State.LEAVING
        reason = f": {replica.reason}" if replica.reason and replica.state is not State.LEAVING else ""
        level = logging.INFO if well else logging.WARNING
        log.log(level, "replica %s is %s%s", replica.name, replica.state.value, reason)
        if self._balancer is not None:
            self._balancer.changed()
        self._changed.set()
        if replica.state is State.EJECTED:
            for member in self._members.values():
                if member.replica is replica:
                    member.wake()

    def _left_us(self, member: Member) -> Callable[[str], None]:
        def ejected(reason: str) -> None:
            member.replica.eject(reason)
            self._give_up(member.replica, reason)

        return ejected
