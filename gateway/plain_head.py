"""The heads of requests as nearly all clients send them: recognised, or left to aiohttp's parser."""

from __future__ import annotations

import re

import msgspec
from multidict import CIMultiDict

# Longer heads are left to aiohttp, and so are its limits of lines and fields.
MAX_HEAD_BYTES = 4096
_END = b"\r\n\r\n"
# No obs-fold, no bare CR or LF, nothing but printable ASCII: what every parser reads in the same way.
_HEAD = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[A-Za-z0-9-]+: ?[ -~]*\r\n)+)\r\n")
# What clients, proxies and tracing send. None says how the message is framed, but for two that are looked at
# below; headers that do, and those that are not here, are aiohttp's.
_KNOWN = frozenset(
    (
        *("accept", "accept-encoding", "accept-language", "authorization", "baggage", "cache-control"),
        *("connection", "content-length", "content-type", "forwarded", "host", "openai-organization"),
        *("openai-project", "pragma", "traceparent", "tracestate", "user-agent", "via"),
    )
)
_KNOWN_BEGINNINGS = ("x-", "sec-")


class PlainHead(msgspec.Struct, frozen=True):
    """A head: `size` bytes, of a POST to `path` whose body has `length` bytes, at least one."""

    size: int
    path: bytes
    length: int
    headers: CIMultiDict[str]


def read_plain_head(received: bytes) -> PlainHead | None:
    """The head that `received` begins with; None if it is incomplete or not plain."""
    end = received.find(_END, 0, MAX_HEAD_BYTES)
    found = _HEAD.fullmatch(received, 0, end + len(_END)) if end > 0 else None
    if found is None:
        return None
    headers: CIMultiDict[str] = CIMultiDict()
    for line in found[2].decode("ascii").splitlines():
        name, _, value = line.partition(":")
        low = name.lower()
        if name in headers or not (low in _KNOWN or low.startswith(_KNOWN_BEGINNINGS)):
            return None
        headers[name] = value.strip()
    length = headers.get("Content-Length", "")
    if not (length.isdecimal() and len(length) < 10 and int(length) and headers.get("Host")):
        return None
    if headers.get("Connection", "keep-alive").lower() != "keep-alive":
        return None
    return PlainHead(found.end(), found[1], int(length), headers)
