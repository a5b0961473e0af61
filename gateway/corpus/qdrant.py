"""A collection of Qdrant that rows are written to, by three routes of its REST API.

A shard is done once all of its points are acknowledged; a rerun writes the same points under the same ids.

Source: https://api.qdrant.tech/api-reference
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from gateway.corpus.errors import OutputError, RefusedError
from gateway.corpus.options import QdrantOptions
from gateway.corpus.points import bodies_of, body_of
from gateway.corpus.windows import Window

# A minute of pauses, all in all; then the job ends, and a rerun goes on.
_TRIES, _FIRST_PAUSE_S, _LAST_PAUSE_S = 8, 0.5, 30.0
_REQUEST_S = 120.0
_AT_ONCE = 4
_TRANSIENT = (429, 500, 502, 503, 504)
_WRITTEN = ("acknowledged", "completed")


class Qdrant:
    """One worker's connections. Lives on a running loop, and ends with `close`."""

    def __init__(self, options: QdrantOptions) -> None:
        self._options = options
        self._place = URL(options.url) / "collections" / options.collection
        self._session = aiohttp.ClientSession(
            headers={} if options.key is None else {"api-key": options.key},
            timeout=aiohttp.ClientTimeout(total=_REQUEST_S),
        )
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def close(self) -> None:
        """End the connections."""
        await self._session.close()

    async def prepare(self, size: int, dtype: str) -> None:
        """See to it that the collection is there, for vectors of `size` values.

        dtype: of a collection that is made: float16, or float32 for anything else.

        Raises:
            RefusedError: it is of another size or distance, or has vectors with names.
            OutputError: Qdrant does not answer, or refuses.
        """
        status, found = await self._ask("GET", self._place)
        if status == 404:
            vectors: dict[str, object] = {
                "size": size,
                "distance": (self._options.distance or "cosine").capitalize(),
            }
            if dtype == "float16":
                vectors["datatype"] = dtype
            made, answer = await self._ask("PUT", self._place, msgspec.json.encode({"vectors": vectors}))
            status, found = await self._ask("GET", self._place)  # another worker may have made it
            if status == 404:
                raise self._refusal(made, answer)
        if status != 200:
            raise self._refusal(status, found)
        self._check(found, size)

    async def upsert(self, window: Window) -> None:
        """Write the window's rows that have a vector; done when Qdrant has all of them.

        Raises:
            OutputError: Qdrant does not answer, or refuses.
        """
        async with asyncio.TaskGroup() as group:
            for places in bodies_of(window):
                group.create_task(self._upsert(window, places))

    async def _upsert(self, window: Window, places: list[int]) -> None:
        async with self._free:
            body = await asyncio.to_thread(body_of, window, places)
            status, answer = await self._ask("PUT", (self._place / "points") % {"wait": "true"}, body)
        if status != 200:
            raise self._refusal(status, answer)

    def _check(self, found: Mapping[str, Any], size: int) -> None:
        try:
            vectors = found["result"]["config"]["params"]["vectors"]
        except (LookupError, TypeError):
            raise OutputError(f"{self._place} is no collection of Qdrant's") from None
        if "size" not in vectors:
            names = ", ".join(map(repr, vectors)) or "no vectors"
            raise RefusedError(f"collection {self._name} has {names}; one vector without a name is wanted")
        wanted = (self._options.distance or vectors["distance"]).capitalize()
        if (vectors["size"], vectors["distance"]) != (size, wanted):
            raise RefusedError(
                f"collection {self._name} is of {vectors['size']} values and {vectors['distance']}; these"
                f" vectors have {size}, and {wanted} is asked for; give another --qdrant-collection"
            )

    async def _ask(self, method: str, url: URL, body: bytes | None = None) -> tuple[int, Mapping[str, Any]]:
        """The answer, once there is one that will stay: what may pass is waited for.

        Raises:
            OutputError: it did not pass.
        """
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(_TRIES)):
            try:
                status, answer = await self._once(method, url, body)
                if status not in _TRANSIENT:
                    return status, answer
                why = _told(status, answer)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = " ".join(str(error).split()) or type(error).__name__
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(_LAST_PAUSE_S, 2 * pause_s)
        raise OutputError(
            f"collection {self._name} cannot be written: {why}; finished shards stay, a rerun does the others"
        )

    async def _once(self, method: str, url: URL, body: bytes | None) -> tuple[int, Mapping[str, Any]]:
        headers = {} if body is None else {"content-type": "application/json"}
        async with self._session.request(
            method, url, data=body, headers=headers, allow_redirects=False
        ) as response:
            content, status = await response.read(), response.status
        try:
            answer = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError:
            return (503 if status == 200 else status), {}  # of a proxy between us
        if status == 200 and url.query:
            result = answer.get("result")
            became = result.get("status") if isinstance(result, dict) else None
            if became not in _WRITTEN:
                return 503, {"status": {"error": f"points are {became}, not acknowledged"}}
        return status, answer

    @property
    def _name(self) -> str:
        return f"{self._options.collection} at {self._options.url}"

    def _refusal(self, status: int, answer: Mapping[str, Any]) -> OutputError:
        return OutputError(f"collection {self._name} cannot be used: {_told(status, answer)}")


def _told(status: int, answer: Mapping[str, Any]) -> str:
    """What Qdrant says is wrong."""
    told = answer.get("status")
    words = str(told.get("error", "")) if isinstance(told, dict) else ""
    return " ".join(words.split()) or f"status {status}"
