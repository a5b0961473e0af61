"""An asyncio loop whose clock jumps to the next timer instead of sleeping."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TURN_S = 20e-6  # what one turn of a busy loop costs; without it, polling would stop the clock


class _JumpingSelector(selectors.SelectSelector):
    """Looks for I/O without waiting, and moves the clock by as much as it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is ready and no timer is set")
        self.now_s += max(timeout, TURN_S)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and is exact; no threads, no real I/O. A test that would wait for ever fails."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run(main)` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
