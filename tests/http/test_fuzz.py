"""Random bodies: whatever arrives, the answer is no 5xx, and takes little."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.openapi import WORK
from tests.http.served import PATHS, Served, byte_tokenizer, serving

# Of this process, client and server, to one answer; and by the clock, when other processes have the machine.
PROCESSOR_S = 1.0
ANSWER_S = 30.0
ROUTES = [path for work in WORK for path in work.paths]
SETTINGS = settings(
    max_examples=75,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FIELDS = (
    "input",
    "inputs",
    "texts",
    "documents",
    "query",
    "text_1",
    "text_2",
    "ids",
    "embed_dtype",
    "embedding_types",
    "truncate_prompt_tokens",
    "top_n",
    "input_ids",
    "lengths",
    "model",
    "dimensions",
    "encoding_format",
    "normalize",
    "truncate",
    "x",
)

numbers = st.one_of(
    st.integers(-5, 40_000), st.integers(), st.integers(2**31 - 2, 2**31 + 2), st.floats(), st.booleans()
)
words = st.one_of(st.text(max_size=600), st.sampled_from(["float", "base64", "bytes", "fake", "", "AAAA"]))
leaves = st.one_of(st.none(), numbers, words)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=8), st.dictionaries(words, inner, max_size=3)),
    max_leaves=20,
)
likely = st.one_of(
    st.text(max_size=600),
    st.lists(st.text(max_size=20), max_size=5),
    st.lists(st.integers(-2, 30_001), max_size=520),
    st.lists(st.lists(st.integers(0, 30_000), max_size=5), max_size=5),
    values,
)
bodies = st.one_of(
    values,
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=6),
    st.builds(
        lambda value, name, rest: {**rest, name: value},
        likely,
        st.sampled_from(FIELDS[:8]),
        st.dictionaries(st.sampled_from(FIELDS), values),
    ),
)
blocks = st.one_of(st.binary(max_size=64), st.lists(st.integers(-2, 30_001), max_size=9).map(
    lambda ids: b"".join(value.to_bytes(4, "little", signed=True) for value in ids)))  # fmt: skip


def _fits_msgpack(body: Any) -> bool:
    try:
        msgspec.msgpack.encode(body)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


packed = st.one_of(
    bodies.filter(_fits_msgpack),
    st.fixed_dictionaries(
        {"input_ids": blocks}, optional={"lengths": blocks, "dimensions": st.integers(-1, 9)}
    ),
)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.Runner, Served]]:
    """One server for all examples, on a loop that runs while an example asks."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        context = serving(tokenizer=byte_tokenizer())
        server = runner.run(context.__aenter__())
        yield runner, server
        runner.run(context.__aexit__(None, None, None))


def ask(
    running: tuple[asyncio.Runner, Served], body: bytes, headers: dict[str, str], path: str = PATHS[0]
) -> None:
    """Send `body` and look at the answer."""
    runner, server = running

    async def send() -> None:
        before = time.process_time()
        async with asyncio.timeout(ANSWER_S):
            reply = await server.send("POST", path, data=body, headers=headers)
        assert time.process_time() - before < PROCESSOR_S
        assert reply.status < 500, (reply.status, reply.body)
        if reply.status != 200:
            assert len(reply.body) > 10

    runner.run(send())


@SETTINGS
@given(body=bodies, path=st.sampled_from(ROUTES))
@example(body={"input": "\ud800"}, path=PATHS[0])
@example(body={"input": [10**400]}, path=PATHS[0])
def test_random_json(running: tuple[asyncio.Runner, Served], body: Any, path: str) -> None:
    data = json.dumps(
        body
    ).encode()  # NaN, Infinity and lone surrogates included, as Python's clients send them
    ask(running, data, {"Content-Type": "application/json"}, path)


@SETTINGS
@given(
    body=packed,
    accept=st.sampled_from(["*/*", "application/json", "application/msgpack"]),
    path=st.sampled_from(ROUTES),
)
def test_random_msgpack(running: tuple[asyncio.Runner, Served], body: Any, accept: str, path: str) -> None:
    headers = {"Content-Type": "application/msgpack", "Accept": accept}
    ask(running, msgspec.msgpack.encode(body), headers, path)


@SETTINGS
@given(body=st.binary(max_size=300), codec=st.sampled_from(["application/json", "application/msgpack"]))
def test_random_bytes(running: tuple[asyncio.Runner, Served], body: bytes, codec: str) -> None:
    ask(running, body, {"Content-Type": codec})


@SETTINGS
@given(data=st.data())
def test_damaged_bodies(running: tuple[asyncio.Runner, Served], data: st.DataObject) -> None:
    """A good body with one byte changed: closer to the decoder's edges than noise."""
    codec = data.draw(st.sampled_from(["json", "msgpack"]))
    good = {"input": [[1, 2], [3]], "dimensions": 4, "encoding_format": "base64", "model": "fake"}
    body = bytearray(msgspec.json.encode(good) if codec == "json" else msgspec.msgpack.encode(good))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    ask(running, bytes(body), {"Content-Type": f"application/{codec}"})


@SETTINGS
@given(
    name=st.sampled_from(["Content-Type", "Accept", "Authorization", "x-request-id"]),
    value=st.text(max_size=40),
)
def test_random_headers(running: tuple[asyncio.Runner, Served], name: str, value: str) -> None:
    clean = "".join(character for character in value if character.isprintable())
    headers = {"Content-Type": "application/json"} | {name: clean}
    try:
        clean.encode("utf-8")
    except UnicodeEncodeError:
        return
    ask(running, b'{"input":[1]}', headers)
