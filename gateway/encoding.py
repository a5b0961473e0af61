"""Vectors to bytes: cut, normalised, and written straight from their buffer."""

from __future__ import annotations

import asyncio
import binascii
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from gateway.errors import ApiError, ErrorKind
from gateway.media import Media
from gateway.schemas import EmbeddingItem, Written, encode
from rose.batch import Float32

# Values encoded between two turns of the loop: 0.75 ms of JSON floats, the slowest path, at 23 ns a value.
_SLICE_VALUES = 32_768
# Between these, float32 sums of squares lose nothing that matters; outside, norms are taken in float64.
_SMALL_SQUARE, _LARGE_SQUARE = 1e-30, 1e30
_FLOAT32 = np.dtype("<f4")


class Encoding(enum.Enum):
    """How an answer holds its vectors; the value is what requests call it."""

    FLOAT = "float"
    BASE64 = "base64"
    BYTES = "bytes"


def finish(
    vectors: Float32, dimensions: int, normalize: bool, known_squares: Float32 | None = None
) -> Float32:
    """Cut f32[n, D] to its leading f32[n, dimensions], then scale every row to length 1 if `normalize`.

    known_squares: the sums of squares f32[n] of whole rows, where the engine gave them.
    A row of zeros stays one. The result is little-endian and contiguous, and may be `vectors` itself.

    Raises:
        ApiError: NON_FINITE_OUTPUT, naming the first row that holds a NaN or an infinity.
    """
    whole = dimensions >= vectors.shape[1]
    rows = vectors if whole else vectors[:, :dimensions]
    squares: NDArray[Any] | None = known_squares if whole else None
    if squares is None:
        squares = _squares(rows)
    # A NaN or an infinity in a row is one in the sums too, and no comparison with NaN is true.
    listed = squares.tolist()
    usual = min(listed) > _SMALL_SQUARE and sum(listed) < _LARGE_SQUARE
    if not usual:
        squares = _exact_squares(rows)
    if normalize:
        # One row, as most requests have, by a number: an array of one takes twice as long.
        alone = usual and len(listed) == 1
        rows = rows / (math.sqrt(listed[0]) if alone else np.sqrt(squares)[:, None])
    return np.ascontiguousarray(rows, _FLOAT32)


def _squares(rows: Float32) -> NDArray[Any]:
    """Sums of squares of rows as they are, infinite where they overflow."""
    if len(rows) == 1:  # this product warns of no overflow, so it needs no guard, which takes longer than it
        return np.array([np.vdot(rows, rows)])
    with np.errstate(all="ignore"):
        return np.asarray(np.vecdot(rows, rows))


def _exact_squares(rows: Float32) -> NDArray[np.float64]:
    """Sums of squares f64[n] of rows that hold very small or large values; 1 for a row of zeros."""
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        message = f"the model gave a vector that is not finite for input[{int(finite.argmin())}]"
        raise ApiError(ErrorKind.NON_FINITE_OUTPUT, message)
    wide = rows.astype(np.float64)
    squares: NDArray[np.float64] = np.vecdot(wide, wide)
    squares[squares == 0] = 1
    return squares


async def items(
    vectors: NDArray[Any], encoding: Encoding, media: Media, indices: Sequence[int] | None = None
) -> list[msgspec.Raw]:
    """Encoded EmbeddingItems of vectors [n, dim], little-endian. Gives the loop a turn between slices.

    indices: what the items' `index` is; None: 0, 1, 2, ...
    Turns beat a thread here: nothing in it releases the GIL, so a thread would hold up the loop just as long.
    """
    write = WRITERS[encoding, media]
    rows_a_slice = max(1, _SLICE_VALUES // vectors.shape[1])
    numbers = range(len(vectors)) if indices is None else indices
    encoded: list[msgspec.Raw] = []
    for start in range(0, len(vectors), rows_a_slice):
        if start:
            await asyncio.sleep(0)
        encoded += [
            msgspec.Raw(encode(EmbeddingItem(index=index, embedding=write(row)), media))
            for index, row in zip(numbers[start:], vectors[start : start + rows_a_slice], strict=False)
        ]
    return encoded


async def json_rows(values: NDArray[Any]) -> bytes:
    """JSON of an array [n, w] as a list of lists. Gives the loop a turn between slices."""
    rows_a_slice = max(1, _SLICE_VALUES // max(1, values.shape[1]))
    parts: list[bytes] = []
    for start in range(0, len(values), rows_a_slice):
        if start:
            await asyncio.sleep(0)
        part = orjson.dumps(values[start : start + rows_a_slice], option=orjson.OPT_SERIALIZE_NUMPY)
        parts.append(part[1:-1])
    return b"[" + b",".join(parts) + b"]"


def json_numbers(values: NDArray[Any]) -> msgspec.Raw:
    """JSON of an array. float32's own shortest digits take half the bytes and half the time of float64's."""
    return msgspec.Raw(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))


# How the values of one array are written in an item.
WRITERS: dict[tuple[Encoding, Media], Callable[[NDArray[Any]], Written]] = {
    (Encoding.FLOAT, Media.JSON): json_numbers,
    (Encoding.FLOAT, Media.MSGPACK): lambda row: row.tolist(),
    # msgspec writes bytes as base64, 25 % faster than binascii and without the copy into a string.
    (Encoding.BASE64, Media.JSON): lambda row: row.data,
    (Encoding.BASE64, Media.MSGPACK): lambda row: binascii.b2a_base64(row.data, newline=False).decode(),
}
