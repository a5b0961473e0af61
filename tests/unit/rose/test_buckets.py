"""Buckets hold what they must, waste little and are few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.buckets import (
    row_bucket,
    row_buckets,
    sequence_bucket,
    sequence_buckets,
    shapes,
    token_bucket,
    token_buckets,
)

COUNTS = st.integers(1, 131_072)


@given(COUNTS)
def test_a_token_bucket_is_the_smallest_that_holds_the_tokens(num_tokens: int) -> None:
    bucket = token_bucket(num_tokens)
    assert bucket >= num_tokens
    assert bucket == min(b for b in token_buckets(bucket) if b >= num_tokens)
    assert token_bucket(bucket) == bucket


@given(COUNTS, COUNTS)
def test_buckets_rise_with_what_they_hold(a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert token_bucket(low) <= token_bucket(high)
    assert sequence_bucket(low) <= sequence_bucket(high)


@given(st.integers(513, 131_072))
def test_padding_adds_at_most_an_eighth_to_long_batches(num_tokens: int) -> None:
    assert token_bucket(num_tokens) <= num_tokens * 9 / 8


@given(COUNTS)
def test_a_sequence_bucket_is_the_next_power_of_two(num_seqs: int) -> None:
    bucket = sequence_bucket(num_seqs)
    assert bucket & (bucket - 1) == 0
    assert bucket / 2 < num_seqs <= bucket


def test_token_buckets_are_few_and_multiples_of_16() -> None:
    buckets = list(token_buckets(4096))
    assert buckets == sorted(set(buckets))
    assert len(buckets) == 34
    assert buckets[:6] == [16, 32, 64, 128, 192, 256]
    assert buckets[-2:] == [3840, 4096]
    assert not any(bucket % 16 for bucket in buckets)
    assert len(list(token_buckets(16_384))) == 34 + (16_384 - 4096) // 256
    assert len(list(token_buckets(131_072))) == 82 + 32 + 32 + 32


@given(COUNTS, COUNTS)
def test_rows_on_a_cpu_fit_their_bucket_and_waste_little(a: int, b: int) -> None:
    low, high = sorted((a, b))
    bucket = row_bucket(low)
    assert low <= bucket <= row_bucket(high)
    assert row_bucket(bucket) == bucket
    assert bucket - low <= max(1, low / 8)


def test_rows_on_a_cpu_are_of_few_numbers() -> None:
    buckets = {row_bucket(rows) for rows in range(1, 16_385)}
    assert list(row_buckets(16_384)) == sorted(buckets)
    assert list(row_buckets(99))[-2:] == [96, 99]
    assert len(buckets) == 96
    assert sorted(buckets)[:17] == [*range(2, 33, 2), 36]
    assert sum(row_bucket(rows) for rows in range(1, 513)) <= 1.03 * sum(range(1, 513))
    # What the last layer's picked rows are padded to adds none.
    assert {sequence_bucket(rows) for rows in range(1, 257)} - buckets == {1}


@given(st.integers(1, 3000), st.data())
def test_shapes_has_every_shape_that_can_occur(max_tokens: int, data: st.DataObject) -> None:
    max_seqs = data.draw(st.integers(1, 256))
    every = list(shapes(max_tokens, max_seqs))
    assert len(every) == len(set(every))
    num_tokens = data.draw(st.integers(1, max_tokens))
    num_seqs = data.draw(st.integers(1, min(max_seqs, num_tokens)))
    assert (token_bucket(num_tokens), sequence_bucket(num_seqs)) in every


def test_shapes_start_with_the_largest_and_leave_out_more_sequences_than_tokens() -> None:
    every = list(shapes(128, 256))
    assert every[0] == (128, 128)
    assert every[-1] == (16, 1)
    assert (16, 32) not in every
    assert list(sequence_buckets(5)) == [1, 2, 4, 8]
