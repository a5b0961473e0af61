"""HTTP to one replica: chunks, probes, and what it says of itself. Knows nothing of the others."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import hdrs
from aiohttp.abc import AbstractResolver, ResolveResult

from gateway.deadline import HEADER
from gateway.media import Media
from gateway.replicas import wire
from gateway.replicas.chunks import Chunk
from gateway.replicas.endpoints import Endpoint
from gateway.replicas.errors import Busy, Expired, Lost, NotSent, Rejected, ReplicaError, Unavailable
from gateway.routes.health import INFO_PATH, READY_PATH
from rose.batch import BatchResult, EngineInfo

_CONNECT_S, _PROBE_S = 2.0, 5.0
# Less than the replicas' own, which is 75 s, so that no chunk meets a connection that is being closed.
_KEEPALIVE_S = 30.0
# For the way of a chunk to a replica, and of its rows back.
_WAY_S = 10.0
# Where nothing comes for so many seconds the kernel asks whether the other end is still there; so many
# seconds apart, and so often, until it says that it is not.
_ASKING = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
_PLACE = re.compile(r"input\[(\d+)\]")
_DEFAULT_RETRY_S = 1.0
_MOST_PAGE_BYTES = 1 << 20
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


class ReplicaClient:
    """Connections to `endpoint`, as many as chunks are under way.

    key: its API key, if it has one. step_timeout_s: what one step may take there. carried: headers that go
    along with a chunk; called for each.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        key: str | None,
        step_timeout_s: float,
        carried: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._step_timeout_s = step_timeout_s
        self._carried = carried
        connector: aiohttp.BaseConnector
        if endpoint.uds is not None:
            connector = aiohttp.UnixConnector(str(endpoint.uds), limit=0, keepalive_timeout=_KEEPALIVE_S)
        else:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEPALIVE_S,
                resolver=_Pinned(endpoint.address),
                socket_factory=_asking_socket,
            )
        headers = {hdrs.CONTENT_TYPE: Media.MSGPACK.value}
        if key is not None:
            headers[hdrs.AUTHORIZATION] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            endpoint.url,
            connector=connector,
            headers=headers,
            skip_auto_headers=(hdrs.ACCEPT_ENCODING, hdrs.ACCEPT, hdrs.USER_AGENT),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """End the connections."""
        await self._session.close()

    async def run(self, chunk: Chunk, left_s: float | None, info: EngineInfo) -> BatchResult:
        """Rows of `chunk`. left_s: seconds until it must have been started; None: no matter when.

        What was started in time may take a step longer. An answer that does not come by then never will: what
        is between us may have lost it, while the replica is as well as ever.

        Raises:
            ReplicaError: there are none; which one says why.
        """
        run = chunk.run
        body = wire.ask(run.sequences, run.token_type_ids, run.spans, chunk.job.token_outputs)
        headers, limit_s = self._carried(), None
        if left_s is not None:
            headers[HEADER] = f"{max(1.0, left_s * 1e3):.0f}"
            limit_s = max(0.0, left_s) + self._step_timeout_s + _WAY_S
        status, told, answer = await self._post(body, headers, limit_s)
        if status != 200:
            raise _refusal(status, told, answer, run.first_row)
        try:
            return wire.read_answer(answer, run.num_rows, run.num_tokens, info)
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            raise Lost(f"its answer makes no sense: {error}") from None

    async def _post(
        self, body: bytes, headers: Mapping[str, str], limit_s: float | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        timeout = aiohttp.ClientTimeout(total=limit_s, connect=_CONNECT_S)
        try:
            async with self._session.post(
                wire.PATH, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, response.headers, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotSent(f"cannot be reached: {_words(error)}") from None
        except TimeoutError:
            raise Lost("no answer in the time that its deadline and a step allow") from None
        except _BROKEN as error:
            raise Lost(f"the connection broke: {_words(error)}") from None

    async def describe(self) -> Mapping[str, Any]:
        """What /info says.

        Raises:
            ReplicaError: it says nothing.
        """
        status, body = await self._get(INFO_PATH)
        if status == 200:
            try:
                described: Mapping[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
                return described
            except msgspec.MsgspecError as error:
                raise Rejected(f"{INFO_PATH} is no JSON: {error}") from None
        raise _refusal(status, {}, body, 0)

    async def check(self) -> None:
        """Return if it takes work.

        Raises:
            ReplicaError: it does not.
        """
        status, body = await self._get(READY_PATH)
        if status != 200:
            raise _refusal(status, {}, body, 0)

    async def _get(self, path: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=_PROBE_S, connect=_CONNECT_S)
        try:
            async with self._session.get(path, timeout=timeout, allow_redirects=False) as response:
                return response.status, await _page(response)
        except TimeoutError:  # of the connection's, too
            raise Lost(f"no answer within {_PROBE_S:g} s") from None
        except _BROKEN as error:
            raise NotSent(f"cannot be reached: {_words(error)}") from None


async def _page(response: aiohttp.ClientResponse) -> bytes:
    """Its body. What has no end is no page of a replica's, and must not fill our memory."""
    page = b""
    async for block in response.content.iter_any():
        page += block
        if len(page) > _MOST_PAGE_BYTES:
            raise Rejected(f"{response.url.path} gives more than {_MOST_PAGE_BYTES} bytes")
    return page


class _Pinned(AbstractResolver):
    """One address, whatever the name: others of that name are other replicas."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        place = {"hostname": host, "host": self._address, "port": port}
        return [ResolveResult(**place, family=family, proto=0, flags=flags)]  # type: ignore[typeddict-item]

    async def close(self) -> None:
        """Nothing to close."""


def _asking_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that ends when the other end is gone without a word: its machine, or what kept track between us."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _ASKING:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _refusal(status: int, headers: Mapping[str, str], body: bytes, first_row: int) -> ReplicaError:
    """What an answer other than 200 means. first_row: of the chunk, in its request."""
    code, message = _told(body)
    message = _PLACE.sub(lambda place: f"input[{int(place[1]) + first_row}]", message) or f"status {status}"
    if status == 503:
        memory = code == "out_of_memory"
        return Unavailable(message, _retry_after_s(headers), out_of_memory=memory)
    if status == 429:
        return Busy(message, _retry_after_s(headers))
    if status == 504:
        return Expired(message)
    if status == 502:  # of a proxy between us
        return Lost(message)
    return Rejected(message)


def _told(body: bytes) -> tuple[str, str]:
    """Code and message of an error's body, in either codec."""
    for decode in (msgspec.msgpack.decode, msgspec.json.decode):
        try:
            error = decode(body)["error"]
            return str(error["code"]), str(error["message"])
        except (msgspec.MsgspecError, LookupError, TypeError):
            continue
    return "", ""


def _retry_after_s(headers: Mapping[str, str]) -> float:
    for name, scale in (("retry-after-ms", 1e-3), (hdrs.RETRY_AFTER, 1.0)):
        text = headers.get(name, "")
        if text.isdecimal():
            return min(60.0, int(text) * scale)
    return _DEFAULT_RETRY_S


def _words(error: BaseException) -> str:
    text = re.sub(r" ssl:\w+", "", str(error))  # aiohttp says so of plain HTTP, too
    return " ".join(text.split()) or type(error).__name__
