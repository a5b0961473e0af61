"""Bodies with too many values are refused before they are decoded, and others never are."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import msgspec
import pytest

from gateway.body_values import MAX_CONTAINERS, MAX_VALUES, check_values
from gateway.errors import ApiError
from gateway.media import Media

N = MAX_CONTAINERS


def packed_list(count: int, item: bytes) -> bytes:
    """A msgpack map {"input": [item, item, ...]}."""
    return b"\x81\xa5input\xdd" + count.to_bytes(4, "big") + item * count


TOO_MANY = {
    "json lists": (b'{"input":[' + b"[]," * N + b"[1]]}", Media.JSON),
    "json objects": (b'{"inputs":[' + b"{}," * N + b"{}]}", Media.JSON),
    "json lists between strings": (b'{"input":[' + b'"\\\\",[],' * N + b'""]}', Media.JSON),
    "json lists that never end": (b'{"input":' + b"[" * (N + 1), Media.JSON),
    "json values": (b'{"input":[' + b"1," * MAX_VALUES + b"1]}", Media.JSON),
    "msgpack lists": (packed_list(N + 1, b"\x90"), Media.MSGPACK),
    "msgpack values": (packed_list(MAX_VALUES + 1, b"\x01"), Media.MSGPACK),
    "msgpack fields": (b"\xdf" + (N + 1).to_bytes(4, "big") + b"\xa1a\x01" * (N + 1), Media.MSGPACK),
    "msgpack lists within": (
        msgspec.msgpack.encode({"inputs": [{"content": [{"type": ""}] * (N + 1)}]}),
        Media.MSGPACK,
    ),
}
TOO_MANY["msgpack lists in lists of fewer"] = (
    msgspec.msgpack.encode({"input": [[[]] * 100_000, [[]] * 100_000]}),
    Media.MSGPACK,
)
TOO_MANY["msgpack values in lists of fewer"] = (
    msgspec.msgpack.encode({"input": [[[1] * 100_000]] * 21}),
    Media.MSGPACK,
)
TOO_MANY["msgpack levels"] = (b"\x91" * 100 + msgspec.msgpack.encode(["a" * N]), Media.MSGPACK)
MIXED = b"\x81\xa5input\xdd" + (N + 2).to_bytes(4, "big") + b"\x01" + b"\x91\x01" * (N + 1)
TOO_MANY["msgpack lists behind a number"] = (MIXED, Media.MSGPACK)


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many(name: str) -> None:
    body, media = TOO_MANY[name]
    with pytest.raises(ApiError, match="the body has too many"):
        check_values(body, media)


ENOUGH = {
    "lists": {"input": [[1]] * (N - 2)},
    "numbers": {"input": [1] * 1_048_576},
    "a text of brackets": {"input": "[{," * N},
    "texts of brackets": {"input": ["[{", '"[\\'] * N},
    "a text that ends in escapes": {"input": "\\" * N + '"' * N + "[" * N},
    "strings": {"input": ["a"] * (N + 1)},
}


@pytest.mark.parametrize("name", ENOUGH)
def test_as_many_as_a_request_may_have(name: str) -> None:
    body = ENOUGH[name]
    check_values(json.dumps(body).encode(), Media.JSON)
    check_values(msgspec.json.encode(body), Media.JSON)
    check_values(msgspec.msgpack.encode(body), Media.MSGPACK)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1" * 200_000,
        b"\x81\xa5input\xdd\xff\xff" + b"\x01" * 200_000,
        b"\x91" * 200_000,
        b"\xdc" * 200_000,
    ],
)
def test_what_is_no_msgpack_is_left_to_the_decoder(body: bytes) -> None:
    check_values(body, Media.MSGPACK)


def test_a_nested_body_takes_no_longer_the_deeper_it_is() -> None:
    """7 MB of numbers, 30 and 900 levels down: it was read once a level."""
    numbers = msgspec.msgpack.encode([list(range(128)) * 900] * 30)
    took = {}
    for levels in (30, 900):
        started = time.process_time()
        with suppress(ApiError):
            check_values(b"\x91" * levels + numbers, Media.MSGPACK)
        took[levels] = time.process_time() - started
    assert took[900] < 1.5 * took[30] + 0.1
