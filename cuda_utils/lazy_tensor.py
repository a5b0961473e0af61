"""The result of device work that may still be running. Knows neither the work nor its result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from cuda_utils.completion import completed
from cuda_utils.errors import DeviceError
from cuda_utils.event import Event

T = TypeVar("T")

_ORDER = itertools.count()


class LazyTensor(Generic[T]):
    """An event, and a function that turns what the work left in host memory into a value, run once after it.

    Whoever records the event anew must have seen `done` first: that fetches the value.
    Used from one thread. It may be awaited many times, by many tasks; cancelling one disturbs no other.

    No limit of time: whoever launched the work knows best how long it may take.

    order: rises with creation, which must follow the order of launches on the stream.
    due_s: when the work is predicted to be done, in seconds of `time.monotonic`, or None. Predicted when
        first asked for, which is when someone starts to wait.
    """

    __slots__ = ("_due_s", "_error", "_event", "_finish", "_predict_s", "_value", "order")

    def __init__(
        self,
        event: Event,
        finish: Callable[[DeviceError | None], T],
        *,
        predict_s: Callable[[], float | None] | None = None,
    ) -> None:
        """event: recorded behind the work. finish: takes the device's error, if any; what it does is kept.

        predict_s: gives `due_s`; called at most once.
        """
        self._event = event
        self._finish: Callable[[DeviceError | None], T] | None = finish
        self._value: T
        self._error: Exception | None = None
        self._predict_s = predict_s
        self._due_s: float | None = None
        self.order = next(_ORDER)

    @property
    def due_s(self) -> float | None:
        """See above."""
        predict_s, self._predict_s = self._predict_s, None
        if predict_s is not None:
            self._due_s = predict_s()
        return self._due_s

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
        self._predict_s = None  # it may hold what the work needed
        try:
            self._value = finish(error)
        except Exception as raised:
            self._error = raised.with_traceback(None)  # which keeps this frame, and so `self`

    def __repr__(self) -> str:
        state = "running" if self._finish is not None else "failed" if self._error else "ready"
        return f"<LazyTensor {self.order} {state}>"
