"""Vectors to bytes: cutting, scaling, what is refused, and turns for the loop."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gateway.encoding import Encoding, finish, items
from gateway.errors import ApiError, ErrorKind
from gateway.media import Media
from rose.batch import Float32

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=finite)


@given(vectors=matrices, data=st.data())
@settings(max_examples=100, deadline=None)
def test_cut_rows_keep_their_values(vectors: Float32, data: st.DataObject) -> None:
    dimensions = data.draw(st.integers(1, vectors.shape[1]))
    np.testing.assert_array_equal(finish(vectors, dimensions, normalize=False), vectors[:, :dimensions])


@given(vectors=matrices, data=st.data())
@settings(max_examples=200, deadline=None)
def test_normalised_rows_have_length_one_and_their_direction(vectors: Float32, data: st.DataObject) -> None:
    """Whatever float32 holds: subnormal rows, squares that overflow, and rows of zeros, which stay so."""
    dimensions = data.draw(st.integers(1, vectors.shape[1]))
    rows = finish(vectors, dimensions, normalize=True)
    exact = vectors[:, :dimensions].astype(np.float64)
    for row, whole in zip(rows, exact, strict=True):
        norm = math.hypot(*whole)
        wanted = whole / norm if norm else whole
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)


@given(vectors=matrices, data=st.data(), normalize=st.booleans())
@settings(max_examples=200, deadline=None)
def test_known_squares_change_nothing(vectors: Float32, data: st.DataObject, normalize: bool) -> None:
    """Whether rows are served whole or cut; also where float32 has no room for the squares."""
    dimensions = data.draw(st.integers(1, vectors.shape[1]))
    with np.errstate(over="ignore", under="ignore"):
        squares = np.vecdot(vectors, vectors)
    rows = finish(vectors, dimensions, normalize, squares)
    np.testing.assert_allclose(rows, finish(vectors, dimensions, normalize), rtol=2e-7)


@given(vectors=matrices, data=st.data(), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
@settings(max_examples=100, deadline=None)
def test_a_value_that_is_not_finite_names_its_row(vectors: Float32, data: st.DataObject, bad: float) -> None:
    row, column = data.draw(st.integers(0, len(vectors) - 1)), data.draw(st.integers(0, vectors.shape[1] - 1))
    vectors = vectors.copy()
    vectors[row, column] = bad
    for normalize in (True, False):
        with pytest.raises(ApiError, match=rf"input\[{row}\]") as caught:
            finish(vectors, vectors.shape[1], normalize)
        assert caught.value.kind is ErrorKind.NON_FINITE_OUTPUT
    if column:
        finish(vectors, column, normalize=True)  # what is cut off is not served and does not matter


def test_the_result_is_little_endian_contiguous_and_leaves_the_engine_s_buffer_alone() -> None:
    vectors = np.arange(12, dtype=np.float32).reshape(3, 4)
    before = vectors.copy()
    for normalize in (True, False):
        rows = finish(vectors, 3, normalize)
        assert rows.dtype == np.dtype("<f4")
        assert rows.flags.c_contiguous
    np.testing.assert_array_equal(vectors, before)
    assert np.shares_memory(finish(vectors, 4, normalize=False), vectors)  # nothing to do: nothing copied


@pytest.mark.parametrize("media", list(Media))
@pytest.mark.parametrize("encoding", [Encoding.FLOAT, Encoding.BASE64])
async def test_a_large_answer_gives_the_loop_turns(encoding: Encoding, media: Media) -> None:
    """2 M values in slices of 32 k: the loop turns between any two, so it waits for one of them at most."""
    vectors = np.zeros((2048, 1024), np.float32)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.ensure_future(count())
    assert len(await items(vectors, encoding, media)) == 2048
    counter.cancel()
    assert turns >= 2048 * 1024 // 32_768 - 1


async def test_a_small_answer_is_made_in_one_go() -> None:
    coroutine = items(np.zeros((32, 1024), np.float32), Encoding.BASE64, Media.JSON)
    with pytest.raises(StopIteration) as finished:
        coroutine.send(None)
    assert len(finished.value.value) == 32
