"""A queue of device work, run in order: a CUDA stream, or on the CPU one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from cuda.bindings import driver, runtime

from cuda_utils.errors import DeviceError, check

Mark: TypeAlias = Callable[[DeviceError | None], None]


def select_device(index: int) -> None:
    """Make CUDA device `index` the calling thread's, for cuda-python (torch keeps its own idea of it)."""
    check(runtime.cudaSetDevice(index), "cudaSetDevice")


class CudaStream:
    """A CUDA stream that someone else (torch) created and keeps alive.

    handle: the CUstream object, built once: cuda-python would wrap a plain integer at each call. Every step
    calls the driver directly: that is one library less whose code would have to come from memory again.
    """

    __slots__ = ("handle",)

    def __init__(self, pointer: int) -> None:
        self.handle = driver.CUstream(pointer)

    def synchronize(self) -> None:
        """Block until all work queued so far is done.

        Raises:
            CudaError: the work, or earlier work, failed.
        """
        check(runtime.cudaStreamSynchronize(self.handle), "cudaStreamSynchronize")


class CpuStream:
    """The CPU's stand-in for a stream: one thread that runs what is launched, in order.

    Work that raises leaves the stream broken, as a sticky CUDA error does: the work behind it is skipped and
    every mark behind it receives the error.
    """

    def __init__(self, name: str, on_start: Callable[[], None] | None = None) -> None:
        """Start the thread called `name`; `on_start` runs in it before any work."""
        self._queue: SimpleQueue[tuple[Callable[[], None] | None, Mark | None] | None] = SimpleQueue()
        self._error: DeviceError | None = None
        self._closed = False
        self._on_start = on_start
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def broken(self) -> str | None:
        """Why nothing more can be launched, or None."""
        return "the stream is closed" if self._closed else None if self._error is None else str(self._error)

    def launch(self, work: Callable[[], None]) -> None:
        """Queue `work`.

        Raises:
            DeviceError: the stream is closed, or earlier work broke it.
        """
        self._refuse_if_broken()
        self._queue.put((work, None))

    def mark(self, reached: Mark) -> None:
        """Have `reached(error or None)` called, on the stream's thread, when all work queued so far is done.

        Raises:
            DeviceError: the stream is closed.
        """
        if self._closed:
            raise DeviceError("the stream is closed", sticky=True)
        self._queue.put((None, reached))

    def synchronize(self) -> None:
        """Block until all work queued so far is done.

        Raises:
            DeviceError: work broke the stream, or it is closed.
        """
        reached = threading.Event()
        self.mark(lambda _error: reached.set())
        reached.wait()
        self._refuse_if_broken()

    def close(self) -> None:
        """Run what is queued, then end the thread. May be called twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _refuse_if_broken(self) -> None:
        if self._closed:
            raise DeviceError("the stream is closed", sticky=True)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._on_start is not None:
            self._attempt(self._on_start)
        while (item := self._queue.get()) is not None:
            work, reached = item
            if work is not None and self._error is None:
                self._attempt(work)
            if reached is not None:
                reached(self._error)
            # A reference kept while waiting for the next item would keep a finished batch alive.
            del item, work, reached

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the thread must outlive anything, or marks would never be reached
            self._error = DeviceError(f"the worker failed: {error!r}", sticky=True)
            self._error.__cause__ = error
