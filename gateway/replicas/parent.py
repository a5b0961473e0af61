"""How an engine's process follows the one that started it: it ends when told so, and never outlives it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, is gone, however that went.

    Source: prctl(2).

    Raises:
        OSError: this is no Linux.
    """
    if not sys.platform.startswith("linux"):
        raise OSError("engines in processes of their own need Linux")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)


def when_told(ending: Callable[[], None]) -> None:
    """Call `ending` when the parent closes our standard input: signals are for it, and it drains first."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ending()

    loop.add_reader(0, look)
