"""The decoders of bodies without a server around them: any bytes are a request or a refusal, nothing else."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import body_values
from gateway.body_values import check_values
from gateway.errors import ApiError, ErrorKind
from gateway.media import Media
from gateway.openapi import WORK
from gateway.schemas import decode

KINDS = list(dict.fromkeys(kind for work in WORK for kind in work.requests))
SETTINGS = settings(max_examples=400, deadline=None)

# MessagePack's strings are UTF-8, in which no half of a surrogate pair can be written; JSON can.
characters = st.characters(exclude_categories=["Cs"])
texts = st.text(alphabet=st.one_of(characters, st.sampled_from('[]{},"\\')), max_size=12)
leaves = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=25,
)


def damaged(data: st.DataObject, body: bytes) -> bytes:
    """`body` with some bytes cut out, put in or changed."""
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(body)))
        body = body[:place] + data.draw(st.binary(max_size=4)) + body[place + data.draw(st.integers(0, 3)) :]
    return body


@SETTINGS
@given(data=st.data(), value=st.one_of(values, st.dictionaries(st.sampled_from(["input", "inputs"]), values)))
@pytest.mark.parametrize("media", Media)
def test_any_body_is_a_request_or_refused(media: Media, data: st.DataObject, value: Any) -> None:
    good = json.dumps(value).encode() if media is Media.JSON else msgspec.msgpack.encode(value)
    body = damaged(data, good)
    kind = data.draw(st.sampled_from(KINDS))
    try:
        assert isinstance(decode(kind, body, media), kind)
    except ApiError as refusal:
        assert refusal.kind is ErrorKind.INVALID_BODY
        assert len(refusal.message) < 1000


def containers(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + sum(map(containers, parts))


def commas(value: Any) -> int:
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(parts) - 1) + sum(map(commas, parts))


@SETTINGS
@given(value=values, limit=st.integers(1, 8), part_bytes=st.integers(1, 40), ascii_only=st.booleans())
def test_lists_and_values_of_json_are_counted_exactly(
    value: Any, limit: int, part_bytes: int, ascii_only: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    limits = {"MAX_CONTAINERS": limit, "MAX_VALUES": 3 * limit, "_PART_BYTES": part_bytes}
    too_many = containers(value) > limit or commas(value) >= 3 * limit
    with patch.multiple(body_values, **limits):
        if len(body) <= limit or not too_many:
            check_values(body, Media.JSON)
        else:
            with pytest.raises(ApiError):
                check_values(body, Media.JSON)
