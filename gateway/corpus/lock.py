"""One driver an OUT.

On this machine's filesystems the kernel holds the lock, so that it goes with the process however that
ends. Object stores have no locks: there a file is renewed every minute, and stale when it was not for ten.
Of two that start at once the one goes on that wrote last. Were both to go on, for a store that lets a second
pass between a look and a write, it would cost time and no rows: shards are written whole.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from gateway.corpus.errors import OutputError, RefusedError
from gateway.corpus.store import JOB, Store

_NAME = f"{JOB}/lock.json"
_RENEW_S, _STALE_S = 60.0, 600.0
# From writing the file to looking whether it is still ours: longer than from another's look to its write.
_SETTLE_S = 1.0

log = logging.getLogger(__name__)


class Holder(msgspec.Struct, frozen=True):
    """Who drives. renewed_s: seconds since 1970 when it last said so."""

    host: str
    pid: int
    run: str
    renewed_s: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lock:
    """Held from enter to exit. run: a word of this driver alone."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._file: IO[bytes] | None = None
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="corpus-lock", daemon=True)

    def __enter__(self) -> Lock:
        """Take it.

        Raises:
            RefusedError: another driver has it.
            OutputError: OUT cannot be written.
        """
        if self._store.local:
            self._file = self._flock()
        else:
            self._refuse(self._holder())
            self._store.write(_NAME, self._mine())
            time.sleep(_SETTLE_S)
            self._refuse(self._holder())
            self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            return
        self._ended.set()
        self._renewing.join()  # else it could write the file again after this has removed it
        try:
            if self._ours(self._holder()):
                self._store.delete(_NAME)
        except OutputError as failure:
            log.warning("the lock stays for ten minutes: %s", failure)

    def _flock(self) -> IO[bytes]:
        """The file stays when the lock is given back: removing it would let two drivers lock two files."""
        path = Path(self._store.path(_NAME))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
        except OSError as error:
            raise OutputError.of(error, self._store.url) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise self._refusal(self._holder()) from None
        file.truncate(0)
        file.write(self._mine())
        file.flush()
        return file

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            try:
                holder = self._holder()
                if holder is not None and not self._ours(holder):
                    log.warning("%s took %s over: this process was not heard of", holder, self._store.url)
                    return
                self._store.write(_NAME, self._mine())
            except OutputError as error:  # nine more times until it is stale
                log.warning("%s", error)

    def _ours(self, holder: Holder | None) -> bool:
        return holder is not None and holder.run == self._run

    def _mine(self) -> bytes:
        return msgspec.json.encode(Holder(socket.gethostname(), os.getpid(), self._run, time.time()))

    def _holder(self) -> Holder | None:
        content = self._store.read(_NAME)
        try:
            return msgspec.json.decode(content or b"", type=Holder)
        except msgspec.DecodeError:
            return None

    def _refuse(self, holder: Holder | None) -> None:
        if holder is not None and not self._ours(holder) and not _stale(holder, time.time()):
            raise self._refusal(holder)

    def _refusal(self, holder: Holder | None) -> RefusedError:
        who = "another driver" if holder is None else str(holder)
        return RefusedError(f"{self._store.url} is being written by {who}; wait for it, or end it")


def _stale(holder: Holder, now_s: float) -> bool:
    """Whether a driver that left a file must be dead: not renewed for long, or gone from this machine."""
    if now_s - holder.renewed_s > _STALE_S:
        return True
    return holder.host == socket.gethostname() and not Path(f"/proc/{holder.pid}").exists()
