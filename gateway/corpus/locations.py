"""Paths and URLs of files, on this machine or in an object store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs

from gateway.corpus.errors import CorpusError

_GLOB = re.compile(r"[*?\[]")
# Of a URL: what follows is for the filesystem (`?region=...`); other question marks are of a pattern.
_QUERY = re.compile(r"\?\w+=.*")
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^/@]*@")
_PIECES = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(frozen=True, slots=True)
class Location:
    """filesystem: a pyarrow.fs.FileSystem. path: inside it. local: plain files of this machine."""

    filesystem: Any
    path: str

    @property
    def local(self) -> bool:
        """Whether it is a path of this machine."""
        return isinstance(self.filesystem, fs.LocalFileSystem)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file. size: bytes. mtime_ns: when it was last written, 0 where the store does not say."""

    path: str
    size: int
    mtime_ns: int


def locate(url: str) -> Location:
    """What a path or URL names: pyarrow's own filesystems (file, s3, gs, abfs, hdfs), else fsspec's.

    Raises:
        CorpusError: nothing reads such a URL.
    """
    if "://" not in url:
        return Location(fs.LocalFileSystem(), str(Path(url).expanduser().absolute()))
    if url.startswith("s3://") and "allow_delayed_open" not in url:
        # Small files are one request then, and not three.
        url += f"{'&' if _parted(url)[1] else '?'}allow_delayed_open=true"
    try:
        return Location(*fs.FileSystem.from_uri(url))
    except (OSError, pa.ArrowException) as error:
        if str(error).startswith("Unrecognized filesystem type"):
            return _fsspec(url)
        raise CorpusError(f"{shown(url)} cannot be opened: {_without(url, error)}") from None


def _fsspec(url: str) -> Location:
    import fsspec

    try:
        handler, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise CorpusError(f"{shown(url)} cannot be opened: {_without(url, error)}") from None
    return Location(fs.PyFileSystem(fs.FSSpecHandler(handler)), path)


def shown(url: str) -> str:
    """A path or URL as others may see it: without a password, and without what is the filesystem's."""
    return _PASSWORD.sub(r"\1:***@", _parted(url)[0])


def _without(url: str, error: Exception) -> str:
    """What `error` says, with the URL as it may be shown."""
    return str(error).replace(url, shown(url))


def _parted(url: str) -> tuple[str, str]:
    """A URL without its query, and that with its question mark; a path has none."""
    match = _QUERY.search(url) if "://" in url else None
    return (url, "") if match is None else (url[: match.start()], match[0])


def find(url: str) -> tuple[Location, list[FoundFile]]:
    """The files that a path or URL of a file, a folder or a pattern (`*`, `?`, `[]`, `**`) names, by path.

    Of a folder all files below it, but for those whose name, or a folder's, begins with "_" or ".".

    Raises:
        CorpusError: there are none.
    """
    base, pattern = split_pattern(url)
    place = locate(base)
    try:
        files = list(_below(place, base if pattern is None else None))
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{shown(url)} cannot be read: {error}") from error
    if pattern is not None:
        wanted = re.compile(re.escape(place.path.rstrip("/")) + "/" + _regex(pattern))
        files = [file for file in files if wanted.fullmatch(file.path)]
    if not files:
        raise CorpusError(f"{shown(url)}: no such file, and no folder or pattern with files")
    return place, sorted(files, key=lambda file: file.path)


def _below(place: Location, alone: str | None) -> Iterator[FoundFile]:
    """alone: what is asked for, if it may be a file."""
    [info] = place.filesystem.get_file_info([place.path])
    if alone is not None and info.type == fs.FileType.File:
        yield _found(info)
        return
    selector = fs.FileSelector(place.path, allow_not_found=True, recursive=True)
    again: dict[PurePosixPath, bool] = {}
    for entry in place.filesystem.get_file_info(selector):
        inner = PurePosixPath(entry.path).relative_to(place.path)
        if entry.type != fs.FileType.File or any(part[0] in "_." for part in inner.parts):
            continue
        if place.local and inner.parent not in again:
            again[inner.parent] = _goes_round(Path(place.path), inner.parent)
        if not again.get(inner.parent):
            yield _found(entry)


def _goes_round(root: Path, inner: PurePosixPath) -> bool:
    """Whether a link among these folders leads to one above it, which pyarrow follows forty times."""
    folders = [(root / folder).resolve() for folder in (inner, *inner.parents)]
    return len(set(folders)) < len(folders)


def _found(info: Any) -> FoundFile:
    return FoundFile(info.path, info.size or 0, info.mtime_ns or 0)


def split_pattern(url: str) -> tuple[str, str | None]:
    """The folder above a pattern, and the pattern below it."""
    place, query = _parted(url)
    match = _GLOB.search(place)
    if match is None or Path(place).exists():
        return url, None
    base, _, _ = place[: match.start()].rpartition("/")
    pattern = place[len(base) :].lstrip("/")
    return (base or ("/" if place.startswith("/") else ".")) + query, pattern


def _regex(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", pattern)
    return "".join(
        _PIECES.get(part) or (part.replace("[!", "[^") if part.startswith("[") else re.escape(part))
        for part in parts
    )
