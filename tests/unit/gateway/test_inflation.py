"""A compressed body is read to its end or not at all, in small parts, whatever it is made of."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from gateway.inflation import CODINGS, MAX_MEMBERS, PART_BYTES, inflated

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


def whole(body: bytes, coding: str) -> bytes:
    parts = list(inflated(body, coding))
    assert max(map(len, parts), default=0) <= PART_BYTES
    return b"".join(parts)


@given(
    coding=st.sampled_from(CODINGS),
    pieces=st.lists(st.tuples(st.binary(max_size=200), st.integers(1, 3000)), max_size=4),
)
def test_what_was_compressed_comes_back(coding: str, pieces: list[tuple[bytes, int]]) -> None:
    data = b"".join(piece * count for piece, count in pieces)
    assert whole(COMPRESS[coding](data), coding) == data


def test_deflate_without_its_header() -> None:
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    assert whole(raw.compress(b"a" * 1000) + raw.flush(), "deflate") == b"a" * 1000


@pytest.mark.parametrize("coding", CODINGS)
@given(cut=st.integers(1, 10_000))
def test_what_is_cut_short_is_told(coding: str, cut: int) -> None:
    body = COMPRESS[coding](bytes(range(256)) * 1000)
    with pytest.raises(ValueError, match="ends before its end"):
        whole(body[: -min(cut, len(body) - 1)], coding)


@pytest.mark.parametrize("coding", CODINGS)
def test_a_changed_byte_is_told(coding: str) -> None:
    body = bytearray(COMPRESS[coding](bytes(range(256)) * 40))
    body[-3] ^= 1
    if coding == "zstd":  # has no sum unless asked for
        body[0] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        whole(bytes(body), coding)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_follow_one_another_up_to_a_limit(coding: str) -> None:
    compress = COMPRESS[coding]
    assert whole(compress(b"a" * 100_000) + compress(b"") + compress(b"b"), coding) == b"a" * 100_000 + b"b"
    assert whole(compress(b"a") * MAX_MEMBERS, coding) == b"a" * MAX_MEMBERS
    with pytest.raises(ValueError, match="more than 1024 members"):
        whole(compress(b"") * (MAX_MEMBERS + 1), coding)


@pytest.mark.parametrize(
    ("coding", "words"), [("gzip", "damaged"), ("zstd", "damaged"), ("deflate", "5 bytes")]
)
def test_what_follows_the_end_is_told(coding: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        whole(COMPRESS[coding](b"a") + b"after", coding)


def test_a_frame_that_wants_a_window_of_128_mb_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.compression_level: 1}
    compressor = zstd.ZstdCompressor(options=options)
    with pytest.raises(ValueError, match="damaged"):
        whole(compressor.compress(b"a" * 1000) + compressor.flush(), "zstd")
