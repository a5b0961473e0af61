"""The result of device work that may still be running. Knows neither the work nor its result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

from cuda_utils.completion import completed
from cuda_utils.errors import DeviceError
from cuda_utils.event import Event

T = TypeVar("T")

_ORDER = itertools.count()


class Outlook(Protocol):
    """What is known of the end of work that runs. Asked and told only while someone waits for that."""

    def due_s(self) -> float | None:
        """When the work is predicted to be done, in seconds of `time.monotonic`, or None. Asked once."""
        ...

    def near(self, left_s: float) -> None:
        """See `completion.Pending.near`."""
        ...


class LazyTensor(Generic[T]):
    """An event, and a function that turns what the work left in host memory into a value, run once after it.

    Whoever records the event anew must have seen `done` first: that fetches the value.
    Used from one thread. It may be awaited many times, by many tasks; cancelling one disturbs no other.

    No limit of time: whoever launched the work knows best how long it may take.

    order: rises with creation, which must follow the order of launches on the stream.
    due_s: when the work is predicted to be done, in seconds of `time.monotonic`, or None. Predicted when
        first asked for, which is when someone starts to wait.
    """

    __slots__ = ("_asked", "_due_s", "_error", "_event", "_finish", "_outlook", "_value", "order")

    def __init__(
        self,
        event: Event,
        finish: Callable[[DeviceError | None], T],
        *,
        outlook: Outlook | None = None,
    ) -> None:
        """event: recorded behind the work. finish: takes the device's error, if any; what it does is kept.

        outlook: kept until the work is done.
        """
        self._event = event
        self._finish: Callable[[DeviceError | None], T] | None = finish
        self._value: T
        self._error: Exception | None = None
        self._outlook = outlook
        self._asked = False
        self._due_s: float | None = None
        self.order = next(_ORDER)

    @property
    def due_s(self) -> float | None:
        """See above."""
        if not self._asked and self._outlook is not None:
            self._asked = True
            self._due_s = self._outlook.due_s()
        return self._due_s

    def near(self, left_s: float) -> None:
        """See `completion.Pending.near`."""
        if self._outlook is not None:
            self._outlook.near(left_s)

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting. Fetches the value as soon as it can be had."""
        if self._finish is None:
            return True
        error: DeviceError | None = None
        try:
            if not self._event.query():
                return False
        except DeviceError as reported:
            error = reported
        self._settle(error)
        return True

    def result(self) -> T:
        """Block until the work is done.

        Raises:
            Exception: what `finish` raised.
        """
        if self._finish is not None:
            error: DeviceError | None = None
            try:
                self._event.synchronize()
            except DeviceError as reported:
                error = reported
            self._settle(error)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def __await__(self) -> Generator[object, None, T]:
        """As `result`, but suspends the running asyncio task until the work is done."""
        if not self.done:
            yield from completed(self, self._event.subscribe)
        return self.result()

    def _settle(self, error: DeviceError | None) -> None:
        finish, self._finish = self._finish, None
        if finish is None:
            return
        self._outlook = None  # it may hold what the work needed
        try:
            self._value = finish(error)
        except Exception as raised:
            self._error = raised.with_traceback(None)  # which keeps this frame, and so `self`

    def __repr__(self) -> str:
        state = "running" if self._finish is not None else "failed" if self._error else "ready"
        return f"<LazyTensor {self.order} {state}>"
