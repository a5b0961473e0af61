"""Folders for the sockets of our engines; what killed gateways left behind is removed by the next one."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# The path of a socket may have 107 bytes; this is of the folder above that of the sockets.
_MOST_BYTES = 80
_PREFIX = "bouquet-"
# One that is younger may be of a process that has yet to lock it.
_YOUNG_S = 10.0


class SocketFolder:
    """One that nobody else may look into, locked for as long as this process lives. path: where it is."""

    def __init__(self) -> None:
        temporary = tempfile.gettempdir()
        above = Path(temporary if len(os.fsencode(temporary)) <= _MOST_BYTES else "/tmp")
        _sweep(above)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above))
        # Not inherited by the engines, and given back by the kernel however this process ends.
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Remove it once its last socket is gone."""
        with suppress(OSError):
            self.path.rmdir()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._lock)


def _sweep(above: Path) -> None:
    """Remove folders whose process is gone; those that hold anything but sockets are none of ours."""
    for folder in above.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _YOUNG_S:
                _remove(folder)


def _remove(folder: Path) -> None:
    """Raises OSError if its process lives, or it is no such folder."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        entries = list(folder.iterdir())
        if all(entry.is_socket() for entry in entries):
            for entry in entries:
                entry.unlink()
            folder.rmdir()
    finally:
        os.close(lock)
