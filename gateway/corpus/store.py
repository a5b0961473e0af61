"""OUT: parts that appear whole or not at all, and small files beside them.

On this machine a file is written under another name, synced and renamed. Object stores show an object only
once it is complete, so there it is written in place. Elsewhere it is written under another name and moved.
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
from gateway.corpus.locations import locate, shown

# What belongs to the job and not to its result. Readers of datasets pass by names that begin with "_".
JOB = "_corpus"
_TEMPORARY = f"{JOB}/tmp"
# What pyarrow calls its filesystems that are object stores: no folders, and a move would copy.
_OBJECT_STORES = ("s3", "gcs", "abfs")


class Store:
    """The folder OUT, by path or URL. Names are relative to it. Safe to use from several threads.

    url: as it may be shown. Everything raises OutputError where OUT cannot be read or written.
    """

    def __init__(self, url: str) -> None:
        place = locate(url)
        self.url = shown(url)
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
        except OSError as error:
            raise OutputError.of(error, name, "read") from error

    def write(self, name: str, content: bytes) -> None:
        """Put `content` there at once, instead of what may be there."""
        with self.writing(name) as stream:
            stream.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A binary file that becomes `name` when the block ends well, and nothing otherwise."""
        try:
            if self.local:
                opened = self._renamed(Path(self.path(name)))
            elif self.filesystem.type_name in _OBJECT_STORES:
                opened = self._in_place(self.path(name))
            else:
                opened = self._moved(self.path(name))
            with opened as stream:
                yield stream
        except OSError as error:
            raise OutputError.of(error, name) from error

    @contextmanager
    def _in_place(self, path: str) -> Iterator[Any]:
        with self.filesystem.open_output_stream(path) as stream:
            try:
                yield stream
            except BaseException:
                with suppress(OSError):  # closing is all that ends an upload: it makes an object of a half
                    stream.close()
                    self.filesystem.delete_file(path)
                raise

    @contextmanager
    def _moved(self, path: str) -> Iterator[Any]:
        temporary = self._temporary(path)
        for folder in (temporary.rpartition("/")[0], path.rpartition("/")[0]):
            if folder not in self._made:
                self.filesystem.create_dir(folder, recursive=True)
                self._made.add(folder)
        try:
            with self.filesystem.open_output_stream(temporary) as stream:
                yield stream
            self.filesystem.move(temporary, path)
        except BaseException:
            with suppress(OSError):
                self.filesystem.delete_file(temporary)
            raise

    def _temporary(self, path: str) -> str:
        return self.path(f"{_TEMPORARY}/{path.rpartition('/')[2]}.{secrets.token_hex(8)}")

    @contextmanager
    def _renamed(self, path: Path) -> Iterator[Any]:
        temporary = Path(self._temporary(str(path)))
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
        try:
            found = self.filesystem.get_file_info(selector)
        except FileNotFoundError:  # allowed, but it was made before pyarrow asked whether it is there
            return {}
        except OSError as error:
            raise OutputError.of(error, folder or self.url, "read") from error
        return {info.base_name: info.size or 0 for info in found if info.type == fs.FileType.File}

    def size(self, name: str) -> int:
        """Bytes of a file; 0 if it is not there."""
        try:
            [info] = self.filesystem.get_file_info([self.path(name)])
        except OSError as error:
            raise OutputError.of(error, name, "read") from error
        return int(info.size or 0)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            self.filesystem.delete_file(self.path(name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise OutputError.of(error, name, "removed") from error

    def delete_folder(self, name: str) -> None:
        """Remove a folder and all that is in it, if it is there."""
        try:
            self.filesystem.delete_dir(self.path(name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise OutputError.of(error, name, "removed") from error

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
