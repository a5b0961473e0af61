"""Compressed bodies, inflated a part at a time and to their very end: what was cut short is no body."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PART_BYTES = 1 << 16
# Of those that follow one another in a body; each costs some microseconds and may hold nothing.
MAX_MEMBERS = 1024
# RFC 9659: a decoder of HTTP bodies needs no window above 8 MB. By default a frame may ask for 128 MB.
_ZSTD_OPTIONS: Mapping[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
_GZIP = 16 + zlib.MAX_WBITS
_DEFLATE_METHOD = 8


class _Stream(Protocol):
    """One member: `ZstdDecompressor`, or what has its methods."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: memoryview, max_length: int) -> bytes: ...


class _ZlibStream:
    """wbits: which of zlib's formats."""

    def __init__(self, wbits: int) -> None:
        self._zlib = zlib.decompressobj(wbits)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: memoryview, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail or data, max_length)


def _gzip(_: bytes) -> _Stream:
    return _ZlibStream(_GZIP)


def _deflate(body: bytes) -> _Stream:
    """zlib's format, or as some clients send it, without its header."""
    return _ZlibStream(zlib.MAX_WBITS if body[0] & 0xF == _DEFLATE_METHOD else -zlib.MAX_WBITS)


def _zstd(_: bytes) -> _Stream:
    return zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)


_STREAMS: dict[str, Callable[[bytes], _Stream]] = {"gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
_ONE_MEMBER = "deflate"  # a body in one of the others may have several, one behind the other
# Each by what `Content-Encoding` calls it.
CODINGS = tuple(_STREAMS)


def inflated(body: bytes, coding: str) -> Iterator[bytes]:
    """What `body` holds, in parts of up to `PART_BYTES`; some are empty. coding: of `CODINGS`.

    Raises:
        ValueError: it is no such data, or it ends before its end or goes on after it.
    """
    whole, start = memoryview(body), 0
    for number in range(MAX_MEMBERS):
        if start == len(body):
            return
        if number and coding == _ONE_MEMBER:
            raise ValueError(f"{len(body) - start} bytes follow its end")
        stream = _STREAMS[coding](body)
        while not stream.eof:
            given = whole[start : start + PART_BYTES * stream.needs_input]
            start += len(given)
            try:
                part = stream.decompress(given, PART_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise ValueError("it is damaged") from error
            if not part and not given and not stream.eof:
                raise ValueError("it ends before its end")
            yield part
        start -= len(stream.unused_data)
    if start < len(body):
        raise ValueError(f"it has more than {MAX_MEMBERS} members")
