"""Sequences laid end to end are the sequences that they were made of, however they are cut and joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.batch import Int32, RaggedBatch, RaggedIds

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: np.array(ids, np.int32))
SEQUENCES = st.lists(IDS, max_size=8)


def assert_same(found: Sequence[Int32], expected: Sequence[Int32]) -> None:
    assert len(found) == len(expected)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    if isinstance(found, RaggedIds):
        assert found.lengths == tuple(map(len, expected))
        assert found.offsets == (0, *np.cumsum([len(ids) for ids in expected], dtype=int).tolist())
        assert found.offsets[-1] == len(found.flat)
        assert found.flat.dtype == np.int32


@given(SEQUENCES)
def test_they_come_back_as_they_were(sequences: list[Int32]) -> None:
    ragged = RaggedIds.of(sequences)
    assert_same(ragged, sequences)
    assert RaggedIds.of(ragged) is ragged
    for index in range(-len(sequences), len(sequences)):
        np.testing.assert_array_equal(ragged[index], sequences[index])
    for index in (len(sequences), -len(sequences) - 1):
        with pytest.raises(IndexError):
            ragged[index]


@given(SEQUENCES, st.slices(8))
def test_a_slice_is_that_of_a_list(sequences: list[Int32], places: slice) -> None:
    assert_same(RaggedIds.of(sequences)[places], sequences[places])


@given(SEQUENCES, st.data())
def test_a_part_is_a_view(sequences: list[Int32], data: st.DataObject) -> None:
    ragged = RaggedIds.of(sequences)
    stop = data.draw(st.integers(0, len(sequences)))
    start = data.draw(st.integers(0, stop))
    part = ragged.part(start, stop)
    assert_same(part, sequences[start:stop])
    assert np.shares_memory(part.flat, ragged.flat) == bool(len(part.flat))
    assert (part is ragged) == (stop - start == len(sequences))


@given(st.lists(SEQUENCES, max_size=4))
def test_parts_are_joined_in_their_order(parts: list[list[Int32]]) -> None:
    joined = RaggedIds.join([RaggedIds.of(part) for part in parts])
    assert_same(joined, [ids for part in parts for ids in part])


@given(IDS)
def test_one_alone_is_not_copied(ids: Int32) -> None:
    ragged = RaggedIds.of([ids])
    assert ragged.flat is ids
    assert RaggedIds.join([ragged]) is ragged
    assert RaggedBatch.pack(ragged).input_ids is ids


@given(st.lists(IDS, min_size=1, max_size=8))
def test_a_batch_is_the_same_of_either(sequences: list[Int32]) -> None:
    one, other = RaggedBatch.pack(sequences), RaggedBatch.pack(ragged := RaggedIds.of(sequences))
    assert other.input_ids is ragged.flat
    np.testing.assert_array_equal(one.input_ids, other.input_ids)
    np.testing.assert_array_equal(one.cu_seqlens, other.cu_seqlens)
    assert one.cu_seqlens.dtype == other.cu_seqlens.dtype == np.int32
