"""HTTP/1.1 by hand, for clients that do what libraries would not: requests as bytes, answers read or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EMBED = "/v1/embeddings"


@dataclass(frozen=True)
class WireAnswer:
    """A whole answer. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        code: str = self.value["error"]["code"]
        return code


def post(body: object, path: str = EMBED, **headers: str) -> bytes:
    """A POST of `body` as JSON; bytes go as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


async def read_answer(reader: asyncio.StreamReader) -> WireAnswer:
    """The next answer.

    Raises:
        asyncio.IncompleteReadError: the connection ended before all of it was there.
    """
    status, headers = read_head(await reader.readuntil(b"\r\n\r\n"))
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return WireAnswer(status, headers, body)


def first_answer(received: bytes) -> WireAnswer:
    """The answer that everything read from a connection begins with."""
    end = received.index(b"\r\n\r\n") + 4
    status, headers = read_head(received[:end])
    return WireAnswer(status, headers, received[end:][: int(headers.get("content-length", "0"))])


def read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case, of a whole head."""
    line, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(line.split()[1]), headers
