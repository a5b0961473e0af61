"""A point in a stream that can be asked whether it has been passed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from cuda.bindings import driver, runtime

from cuda_utils.errors import CudaError, DeviceError, check
from cuda_utils.stream import CpuStream, CudaStream

_NOT_READY = int(driver.CUresult.CUDA_ERROR_NOT_READY)

_WITHOUT_TIMING = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)


class Event(Protocol):
    """A point in one stream. One that was never recorded counts as passed."""

    def record(self) -> None:
        """Move the event behind all work now queued on its stream.

        Raises:
            DeviceError: the stream is broken.
        """
        ...

    def query(self) -> bool:
        """Whether the work before the record is done. Never blocks.

        Raises:
            DeviceError: that work failed.
        """
        ...

    def synchronize(self) -> None:
        """Block until it is done.

        Raises:
            DeviceError: that work failed.
        """
        ...

    def subscribe(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called once, from any thread, when the event is passed (at once if it is).

        False: this kind of event cannot tell, it has to be asked.
        """
        ...


class CudaEvent:
    """A CUevent without timing, made once and recorded many times.

    A record costs 1.4 µs and a query 2.3 µs on the GPU host; a new torch event with its record costs 13 µs.
    """

    __slots__ = ("_handle", "_query", "_record", "_stream")

    def __init__(self, stream: CudaStream) -> None:
        """Raises: CudaError: no device, or no memory on it."""
        self._stream = stream.handle
        self._handle = check(driver.cuEventCreate(_WITHOUT_TIMING), "cuEventCreate")
        self._query = driver.cuEventQuery
        self._record = driver.cuEventRecord

    def record(self) -> None:
        """See `Event.record`."""
        error = self._record(self._handle, self._stream)[0]
        if error:
            raise CudaError(error, "cuEventRecord")

    def query(self) -> bool:
        """See `Event.query`."""
        error = self._query(self._handle)[0]
        if not error:
            return True
        if error == _NOT_READY:
            return False
        raise CudaError(error, "cuEventQuery")

    def synchronize(self) -> None:
        """See `Event.synchronize`. Spins: it wakes sooner than a blocking wait, for tools, not a server."""
        check(runtime.cudaEventSynchronize(self._handle), "cudaEventSynchronize")

    def subscribe(self, callback: Callable[[], None]) -> bool:
        """Always False: cudaLaunchHostFunc would tell 160 µs later than asking does."""
        return False

    def close(self) -> None:
        """Destroy the event; the driver waits with it for work still in flight."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            check(driver.cuEventDestroy(handle), "cuEventDestroy")


class CpuEvent:
    """The stand-in on a CpuStream, with the same meaning; it also tells its subscribers."""

    __slots__ = ("_callbacks", "_error", "_lock", "_passed", "_records", "_stream")

    def __init__(self, stream: CpuStream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._passed = threading.Event()
        self._passed.set()
        self._error: DeviceError | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._records = 0

    def record(self) -> None:
        """See `Event.record`."""
        with self._lock:
            self._records += 1
            record = self._records
            self._passed.clear()
        self._stream.mark(lambda error: self._reached(record, error))

    def query(self) -> bool:
        """See `Event.query`."""
        if not self._passed.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self._passed.wait()
        self.query()

    def subscribe(self, callback: Callable[[], None]) -> bool:
        """Always True."""
        with self._lock:
            waits = not self._passed.is_set()
            if waits:
                self._callbacks.append(callback)
        if not waits:
            callback()
        return True

    def _reached(self, record: int, error: DeviceError | None) -> None:
        with self._lock:
            if record != self._records:  # recorded again since: only the last record counts
                return
            self._error = error
            callbacks, self._callbacks = self._callbacks, []
            self._passed.set()
        for callback in callbacks:
            callback()
