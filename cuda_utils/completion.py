"""How an event wakes an asyncio loop.

Events that tell (the CPU's) wake it through `call_soon_threadsafe`. CUDA events are asked: once a loop turn
when the step is about to finish, not at all while it is far from finished, and never when nothing is awaited.
Measured on the GPU host over a blocking synchronize: asking each turn +0 µs, a waiting thread +115 µs, a host
callback that writes an eventfd +160 µs.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

# Further away than this, sleep. A core that slept for 2 ms is slower for longer than that: by one that polls
# all the while, steps of 3.1 and 4.6 ms on an H200 are 70 to 150 µs shorter for the client; of 22 ms not.
FAR_S = 0.008
WAKE_EARLY_S = 0.002  # uvloop's timers have a grain of 1 ms and fire up to one grain late
SPIN_S = 0.002  # how long to ask each turn when the finish is unknown or overdue
NAP_S = 0.001  # and the pause between questions after that
# What was slept for is told at once that its end is near, what is polled for when it is NEAR_S away, and both
# again SOON_S before it; but no closer than LATE_S: what is done then would delay its result.
NEAR_S = 0.001
SOON_S = 0.0004
LATE_S = 0.0001
IDLE_TURN_S = 0.00005  # a turn of the loop that took longer had other work, which comes first
# When all is done, the loop turns for so long before it sleeps: who sends one request after the other sends
# the next one now, and to a core that slept for a fifth of a millisecond it takes 20 µs to wake.
LINGER_S = 0.0005


class Pending(Protocol):
    """Something that gets done on the device."""

    @property
    def done(self) -> bool:
        """Whether it is done, well or badly. Asks the device; never raises."""
        ...

    @property
    def order(self) -> int:
        """Rises with the order of launches; what was launched first is done first."""
        ...

    @property
    def due_s(self) -> float | None:
        """When it is predicted to be done, in seconds of `time.monotonic`; None: no idea."""
        ...

    def near(self, left_s: float) -> None:
        """Told once or twice, by an idle loop, that its end is predicted in `left_s`. Never raises."""
        ...


def pause_s(now_s: float, since_s: float, due_s: float | None) -> float:
    """How long to leave the device alone: 0 means to ask again on the next turn of the loop.

    now_s: this moment. since_s: when the wait began. due_s: as in `Pending`. All in seconds of one clock.
    """
    if due_s is None:
        return 0.0 if now_s - since_s < SPIN_S else NAP_S
    if due_s - now_s > FAR_S:
        return due_s - now_s - WAKE_EARLY_S
    return 0.0 if now_s - max(due_s, since_s) < SPIN_S else NAP_S


@dataclass(order=True, slots=True)
class _Wait:
    """One future that waits for one pending thing; sorted by the order of launches.

    near_s: it is told that its end is near when that is at most so far away. 0: not, or not again. None: the
    wait has only begun.
    """

    order: int
    pending: Pending = field(compare=False)
    future: asyncio.Future[None] = field(compare=False)
    since_s: float = field(compare=False)
    near_s: float | None = field(default=None, compare=False)

    def tell(self, left_s: float, *, idle: bool) -> None:
        """Tell the pending thing that its end is near, if it was not from the start and the loop is idle.

        left_s: until then.
        """
        if left_s > FAR_S:
            self.near_s = FAR_S
        elif self.near_s is None:
            self.near_s = next((at_s for at_s in (NEAR_S, SOON_S) if left_s > at_s), 0.0)
        elif idle and LATE_S < left_s <= self.near_s:
            self.near_s = SOON_S if left_s > SOON_S else 0.0
            self.pending.near(left_s)


class Poller:
    """Asks the oldest pending thing of one loop; what is behind it on the same stream cannot be done sooner.

    polls: how often a device was asked. Runs only while someone waits, and LINGER_S longer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Keeps no reference to its loop, which only has a weak one to it in _POLLERS.
        self._clock = clock
        self._waits: list[_Wait] = []
        self._timer: asyncio.Handle | None = None
        self._turned_s = 0.0  # when it was last decided how long to wait
        self.polls = 0

    def wait(self, pending: Pending) -> asyncio.Future[None]:
        """A future resolved (never failed) once `pending` is done. Cancelling it harms nobody else."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        insort(self._waits, _Wait(pending.order, pending, future, self._clock()))
        if self._waits[0].future is future:  # the new oldest may be due before the timer in force
            self._schedule()
        return future

    def __repr__(self) -> str:
        return f"<Poller waits={len(self._waits)} polls={self.polls} armed={self._timer is not None}>"

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        oldest = self._waits[0]
        now_s, due_s = self._clock(), oldest.pending.due_s
        pause = pause_s(now_s, oldest.since_s, due_s)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause, self._poll) if pause else loop.call_soon(self._poll)
        if due_s is not None:
            oldest.tell(due_s - now_s, idle=now_s - self._turned_s < IDLE_TURN_S)
        self._turned_s = now_s

    def _poll(self) -> None:
        self._timer = None
        while self._waits:
            oldest = self._waits[0]
            if not oldest.future.done():  # done: its awaiter was cancelled
                self.polls += 1
                if not oldest.pending.done:
                    self._schedule()
                    return
                oldest.future.set_result(None)
            del self._waits[0]
        self._linger(self._clock() + LINGER_S)

    def _linger(self, until_s: float) -> None:
        """Keep the loop awake until then, unless someone waits: it then is anyway, or may sleep."""
        if not self._waits and self._clock() < until_s:
            # Not kept: what a loop that is closed has yet to call must not keep it alive.
            asyncio.get_running_loop().call_soon(self._linger, until_s)


_POLLERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Poller] = weakref.WeakKeyDictionary()


def poller_of(loop: asyncio.AbstractEventLoop) -> Poller:
    """The one poller of `loop`."""
    poller = _POLLERS.get(loop)
    if poller is None:
        poller = _POLLERS[loop] = Poller()
    return poller


def completed(pending: Pending, subscribe: Callable[[Callable[[], None]], bool]) -> asyncio.Future[None]:
    """A future of the running loop that is resolved once `pending` is done.

    subscribe: `Event.subscribe` of the event behind it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(resolve)

    return future if subscribe(wake) else poller_of(loop).wait(pending)
