"""Plain requests pass aiohttp's parser and writer by; what is answered must not show it.

Each test sends the same bytes to two servers, one of which leaves everything to aiohttp.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.errors import StepError
from tests.http.express_way import IDS, PLAIN_IDS, both, opened, request
from tests.http.served import serving

BLOCK = {"input_ids": b"\x05\0\0\0\x06\0\0\0", "lengths": b"\x01\0\0\0\x01\0\0\0"}
PLAIN = {
    "ids": request(IDS),
    "text": request({"input": "hello"}),
    "texts, base64": request({"input": ["a", "b"], "encoding_format": "base64"}),
    "block": request(BLOCK, media="msgpack"),
    "block as json": request(BLOCK, "Accept: application/json", media="msgpack"),
    "octets": request({**IDS, "encoding_format": "bytes"}),
    "own id": PLAIN_IDS,
    "odd id": request(IDS, "x-request-id: a b"),
    "names in capitals": request(IDS, "ACCEPT: */*", "X-Request-ID: mine"),
    "kept alive": request(IDS, "Connection: Keep-Alive", "Accept-Encoding: gzip", "User-Agent: me/1 (x; y)"),
    "an empty value": request(IDS, "x-empty:"),
    "other dialect": request({"inputs": "x"}, path="/embed"),
    "wrong value": request({"input": []}),
    "wrong value, 422": request({"inputs": [[]]}, path="/embed"),
    "broken body": request(b"{"),
    "other media": request(IDS, media="json").replace(b"application/json", b"text/css"),
    "unknown model": request({**IDS, "model": "none"}),
    "too long": request({"input": [1] * 600}),
    "odd timeout": request(IDS, "x-request-timeout-ms: soon"),
}
OTHER = {
    "path with a query": request(IDS, path="/v1/embeddings?x=1"),
    "encoded path": request(IDS, path="/v1/%65mbeddings"),
    "no such path": request(IDS, path="/nowhere"),
    "GET": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/1.0": request(IDS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "closing": request(IDS, "Connection: close"),
    "unknown header": request(IDS, "Cookie: a=b"),
    "chunked": request(IDS, "Transfer-Encoding: chunked"),
    "expects": request(IDS, "Expect: 100-continue"),
    "gzip": request(gzip.compress(json.dumps(IDS).encode(), mtime=0), "Content-Encoding: gzip"),
    "no host": request(IDS).replace(b"Host: x\r\n", b""),
    "two hosts": request(IDS, "host: y"),
    "two lengths": request(IDS, "Content-Length: 5"),
    "no length": request(IDS).replace(b"Content-Length", b"x-length"),
    "an empty body": request(b""),
    "length with a sign": request(IDS).replace(b"Length: ", b"Length: +"),
    "folded line": request(IDS, "x-a: b\r\n c"),
    "space before the colon": request(IDS, "x-a : b"),
    "bare line feeds": request(IDS).replace(b"\r\n", b"\n"),
    "a zero byte": request(IDS, "x-a: \0"),
    "no ASCII": request(IDS, "x-a: ü"),
    "a long head": request(IDS, "x-a: " + "b" * 5000),
    "too large": request({"input": "a" * 70_000}),
    "two at once": request(IDS) * 2,
    "plain, then not": request(IDS) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
}


@pytest.mark.parametrize("name", PLAIN)
async def test_plain_requests_get_the_same_answer(name: str) -> None:
    short, long, stayed = await both(PLAIN[name], PLAIN[name], max_body_bytes=1 << 16)
    assert short == long
    assert short.count(b"HTTP/1.1 ") == 2
    assert stayed


@pytest.mark.parametrize("name", OTHER)
async def test_other_requests_go_to_aiohttp(name: str) -> None:
    pieces = PLAIN["ids"], OTHER[name], PLAIN["ids"]
    short, long, stayed = await both(*pieces, apart=True, max_body_bytes=1 << 16)
    assert short == long
    assert not stayed


CLIENTS = {
    "requests": (
        "User-Agent: python-requests/2.32",
        "Accept-Encoding: gzip",
        "Accept: */*",
        "Connection: keep-alive",
    ),
    "openai": (
        "accept: application/json",
        "x-stainless-lang: python",
        "openai-project: p",
        "authorization: Bearer k",
    ),
    "node": ("connection: keep-alive", "accept-language: *", "sec-fetch-mode: cors", "user-agent: node"),
    "nginx": ("x-forwarded-for: 10.0.0.1", "via: 1.1 proxy", "forwarded: for=10.0.0.1"),
    "traced": ("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate: a=b"),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_what_common_clients_send_is_plain(name: str) -> None:
    short, long, stayed = await both(request(IDS, *CLIENTS[name]))
    assert short == long
    assert stayed


async def test_a_served_socket_takes_the_short_way() -> None:
    async with serving() as server:
        await server.assert_works()
        (connection,) = server._runner.server.connections
        assert connection._express
        assert server._runner.server.requests_count == 1


async def test_logged_requests_are_left_to_aiohttp(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "gateway.access"):
        async with opened(short=True) as way:
            assert b"200 OK" in await way.answer(PLAIN["own id"])
            assert not way.express
    assert "id=mine-1" in caplog.text


@pytest.mark.parametrize("key", ["", "Authorization: Bearer right", "authorization: bearer wrong"])
async def test_keys_are_asked_for(key: str) -> None:
    line = [key] if key else []
    short, long, stayed = await both(request(IDS, *line), api_keys=("right",))
    assert short == long
    assert short.startswith(b"HTTP/1.1 200" if "right" in key else b"HTTP/1.1 401")
    assert stayed


async def test_a_request_may_come_in_two_pieces_cut_anywhere() -> None:
    wire = request({"input": [5, 6]}, "x-request-id: mine")
    async with opened(short=False) as long:
        expected = await long.answer(wire)
    head = wire.index(b"\r\n\r\n") + 4
    async with opened(short=True) as way:
        for cut in range(1, len(wire)):
            way.wire.written = b""
            assert await way.answer(wire[:cut], wire[cut:]) == expected, cut
            assert way.express == (cut >= head)
            way.protocol._express = True  # aiohttp has seen whole messages only


async def test_a_body_may_come_in_many_pieces() -> None:
    wire = request({"input": list(range(300))})
    short, long, stayed = await both(wire[:150], *[wire[i : i + 100] for i in range(150, len(wire), 100)])
    assert short == long
    assert stayed


_words = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=12)
_NAMES = (
    *(
        "x-a",
        "X-Request-ID",
        "Accept",
        "accept-encoding",
        "Connection",
        "Content-Type",
        "Content-Length",
        "TE",
    ),
    *("Host", "Cookie", "Transfer-Encoding", "Upgrade", "Expect", "Content-Encoding", "Authorization", "a@b"),
    *("TE", "x-request-timeout-ms"),
)
_VALUES = (
    *("application/msgpack", "gzip", "chunked", "keep-alive", "close", "100-continue", "identity", "19", "0"),
    *("*/*", "websocket"),
)
_GAPS = ("", " ", "  ", "\t")
_lines = st.lists(
    st.builds(
        "{}:{}{}".format, st.sampled_from(_NAMES), st.sampled_from(_GAPS), _words | st.sampled_from(_VALUES)
    ),
    max_size=3,
)
_bodies = st.sampled_from(
    [b'{"input":[5,6,7]}', b'{"input":"hello"}', b'{"input":""}', b"\x80", b"GET / HTTP/1.1"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_lines, _bodies, st.lists(st.integers(1, 400), max_size=3), st.booleans())
def test_odd_heads_in_odd_pieces_get_the_same_answer(
    lines: list[str], body: bytes, cuts: list[int], again: bool
) -> None:
    wire = request(body, *lines) + request(IDS) * again
    bounds = [0, *sorted(cuts), len(wire)]
    pieces = [wire[start:end] for start, end in pairwise(bounds) if start < end]
    short, long, _ = asyncio.run(both(*pieces))
    assert short == long


async def test_a_failed_step_is_told_as_ever() -> None:
    answers = []
    for short in (True, False):
        async with opened(short=short) as way:
            way.engine.fail_next(StepError("no"))
            answers.append(await way.answer(PLAIN["own id"], PLAIN["own id"]))
    assert answers[0] == answers[1]
    assert answers[0].startswith(b"HTTP/1.1 500")


async def test_a_large_answer_is_whole() -> None:
    wire = request({"input": [[5, 6]] * 2000})
    short, long, stayed = await both(wire)
    assert short == long
    assert len(short) > 100_000
    assert stayed
