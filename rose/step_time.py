"""Predicts when a step will be done, so that the loop need not ask the device before that."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# An estimate may rise by 2 % a step and falls at once. A result that was fetched late looks like a slow step;
# believing it would make the loop sleep too long the next time, whereas asking too early costs microseconds.
_RISE = 1.02


class StepTimes(Generic[Key]):
    """Time on the device by key, for steps that run one after another in the order of their launch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expected: dict[Key, float] = {}
        self._first: dict[Key, float] = {}
        self._running: OrderedDict[int, Key] = OrderedDict()
        self._started_s = 0.0
        self._tickets = 0

    def launched(self, key: Key) -> int:
        """A ticket for `due_s` and `finished`."""
        if not self._running:
            self._started_s = self._clock()
        self._tickets = ticket = self._tickets + 1
        self._running[ticket] = key
        return ticket

    def due_s(self, ticket: int) -> float | None:
        """When the step will be done, in seconds of the clock; None: unknown."""
        due_s = self._started_s
        for running, key in self._running.items():
            if running > ticket:
                break
            expected_s = self._expected.get(key)
            if expected_s is None:
                return None
            due_s += expected_s
        return due_s

    def finished(self, ticket: int, *, steady: bool) -> None:
        """The step is done, and all before it too. steady: whether its time says what the next will take."""
        now_s = self._clock()
        oldest = next(iter(self._running), ticket)
        if ticket < oldest:  # a later one was fetched before it
            return
        key = self._running[ticket]
        if steady and ticket == oldest:
            self._learn(key, now_s - self._started_s)
        while oldest <= ticket:
            self._running.popitem(last=False)
            oldest = next(iter(self._running), ticket + 1)
        self._started_s = now_s

    def expected_s(self, key: Key) -> float | None:
        """Seconds on the device, or None before two steps were seen."""
        return self._expected.get(key)

    def forget(self, key: Key) -> None:
        """Steps of this key take another time from now on."""
        self._expected.pop(key, None)
        self._first.pop(key, None)

    def _learn(self, key: Key, took_s: float) -> None:
        known_s = self._expected.get(key)
        if known_s is not None:
            self._expected[key] = min(took_s, known_s * _RISE)
        elif key in self._first:
            self._expected[key] = min(took_s, self._first.pop(key))
        else:
            self._first[key] = took_s  # one alone may have been fetched late
