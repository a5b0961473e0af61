"""Runs of adjacent sequences of one length, which plain torch takes in one call without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise


def equal_runs(offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, sequences, tokens each) of every run of adjacent equally long sequences, none empty."""
    start, count, length = 0, 0, 0
    for begin, end in pairwise(offsets):
        if end - begin == length:
            count += 1
            continue
        if count and length:
            yield start, count, length
        start, count, length = begin, 1, end - begin
    if count and length:
        yield start, count, length
