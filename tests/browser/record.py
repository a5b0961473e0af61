"""Keeps what the page at / is sent, so that it can be shown later and elsewhere: see tests/browser/replay.py.

    python tests/browser/record.py FILE [--url http://127.0.0.1:8000] [--seconds 120]

FILE is JSON: the address, the date, and every event with the second at which it came. Needs aiohttp and
msgspec alone, no browser, nothing of this repository. The key of a server that wants one is read from
$BOUQUET_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

EVENTS_PATH = "/dashboard/events"


class Recording(msgspec.Struct):
    """events: (seconds since the first, name, value), oldest first; the first is the model's."""

    url: str
    recorded: str
    events: list[tuple[float, str, Any]]


async def record(url: str, seconds: float, key: str = "") -> Recording:
    """What comes within `seconds`.

    Raises:
        aiohttp.ClientError, OSError: there is no such server, or it ended before.
        RuntimeError: it answers with anything but events.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    made = Recording(url, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), [])
    started_s = 0.0
    # No limit of its own: a stream has no end.
    limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=10)
    async with (
        aiohttp.ClientSession(timeout=limits, read_bufsize=1 << 22) as session,
        session.get(url.rstrip("/") + EVENTS_PATH, headers=headers) as answer,
    ):
        if answer.status != 200:
            raise RuntimeError(f"{answer.url} answers {answer.status}: {(await answer.text())[:200]}")
        async for name, value in _events(answer.content):
            now_s = time.monotonic()
            started_s = started_s or now_s
            made.events.append((round(now_s - started_s, 3), name, value))
            if now_s - started_s >= seconds:
                return made
    raise RuntimeError(f"the server ended the stream after {len(made.events)} events")


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, Any]]:
    while event := (await stream.readuntil(b"\n\n")).decode():
        name, value = event.removeprefix("event: ").rstrip().split("\ndata: ")
        yield name, msgspec.json.decode(value)


def main() -> int:
    """The exit status: 1 with one line on stderr where nothing was recorded."""
    parser = argparse.ArgumentParser(description="Record what the page at / is sent.")
    parser.add_argument("file", metavar="FILE", type=Path, help="where to keep it, as JSON")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (%(default)g)")
    options = parser.parse_args()
    try:
        made = asyncio.run(record(options.url, options.seconds, os.environ.get("BOUQUET_API_KEY", "")))
        options.file.write_bytes(msgspec.json.encode(made))
    except (aiohttp.ClientError, OSError, RuntimeError, asyncio.IncompleteReadError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    print(f"{len(made.events)} events, {options.file.stat().st_size} bytes: {options.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
