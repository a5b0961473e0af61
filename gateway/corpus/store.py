"""OUT: parts that appear whole or not at all, and small files beside them.

On this machine a file is written under another name, synced and renamed. Object stores show an object only
once it is complete, so there it is written in place.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyarrow import fs

from gateway.corpus.errors import OutputError
from gateway.corpus.locations import locate

# What belongs to the job and not to its result. Readers of datasets pass by names that begin with "_".
JOB = "_corpus"
_TEMPORARY = f"{JOB}/tmp"


class Store:
    """The folder OUT, by path or URL. Names are relative to it. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        place = locate(url)
        self.url = url
        self.filesystem = place.filesystem
        self.root = place.path.rstrip("/")
        self.local = place.local
        self._made: set[str] = set()

    def path(self, name: str) -> str:
        """Where `name` is in the filesystem."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes | None:
        """The bytes of `name`, or None if it is not there."""
        try:
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Put `content` there at once, instead of what may be there.

        Raises:
            OutputError: it cannot be written.
        """
        with self.writing(name) as stream:
            stream.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A binary file that becomes `name` when the block ends well, and nothing otherwise.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            if self.local:
                with self._renamed(Path(self.path(name))) as stream:
                    yield stream
            else:
                self._make(self.path(name).rpartition("/")[0])
                with self.filesystem.open_output_stream(self.path(name)) as stream:
                    yield stream
        except OSError as error:
            raise OutputError.of(error, name) from error

    def _make(self, folder: str) -> None:
        """Some stores want folders; in others each costs a request, so once is enough."""
        if folder not in self._made:
            self.filesystem.create_dir(folder, recursive=True)
            self._made.add(folder)

    @contextmanager
    def _renamed(self, path: Path) -> Iterator[Any]:
        temporary = Path(self.path(_TEMPORARY), f"{path.name}.{secrets.token_hex(8)}")
        for folder in (temporary.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
            _sync(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def sizes(self, folder: str) -> dict[str, int]:
        """Names and bytes of the files right in `folder` ("": of OUT itself)."""
        selector = fs.FileSelector(self.path(folder).rstrip("/"), allow_not_found=True)
        found = self.filesystem.get_file_info(selector)
        return {info.base_name: info.size or 0 for info in found if info.type == fs.FileType.File}

    def size(self, name: str) -> int:
        """Bytes of a file; -1 if it is not there."""
        [info] = self.filesystem.get_file_info([self.path(name)])
        return -1 if info.size is None else int(info.size)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:
            OutputError: it cannot be removed.
        """
        try:
            self.filesystem.delete_file(self.path(name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise OutputError.of(error, name) from error

    def sweep(self) -> None:
        """Remove what killed processes left half written. Only while no other process writes here."""
        for name in self.sizes(_TEMPORARY):
            self.delete(f"{_TEMPORARY}/{name}")


def _sync(folder: Path) -> None:
    """A rename survives a loss of power once its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
