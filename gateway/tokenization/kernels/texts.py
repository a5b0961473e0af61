"""What the kernels share: text after text, with the template around its ids, and word after word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gateway.tokenization.kernels.arrays import (
    BOUNDS,
    CURSOR,
    IDS,
    OK,
    PREFIX,
    ROOM,
    STATE,
    SUFFIX,
    Bytes,
    Int64,
)
from gateway.tokenization.kernels.jit import array_at, inner
from gateway.tokenization.kernels.words import MAX_WORD, find, hash_of, recall, remember

# Places in a kernel's state: where the next id goes, where a text's own ids end at the latest, and what is
# missing: the block asked for, or the least bytes of a word.
OUT, LIMIT, MISSING = range(3)


def each_text(encode_text: Callable[..., int]) -> Callable[[Bytes, Int64, Int64], int]:
    """A function that has encode_text(text, span, memory) write the ids of each text from cursor[0] on.

    It takes what a kernel's `encode` takes. One that is handed over when it is called could not be kept.
    """

    @inner
    def of_each_text(text: Bytes, bounds: Int64, memory: Int64) -> int:
        cursor, state = array_at(memory, CURSOR, np.int64), array_at(memory, STATE, np.int64)
        while cursor[0] < len(bounds) - 1:
            if not _begin_text(memory):
                return ROOM
            code = encode_text(text, (bounds[cursor[0]], bounds[cursor[0] + 1]), memory)
            if code != OK:
                cursor[1] = state[MISSING]
                return code
            if not _end_text(memory):
                return ROOM
        return OK

    return of_each_text


@inner
def _begin_text(memory: Int64) -> bool:
    """Write the template's prefix before the text cursor[0]; False: there is no room."""
    ids, bounds = array_at(memory, IDS, np.int32), array_at(memory, BOUNDS, np.int64)
    cursor, prefix = array_at(memory, CURSOR, np.int64), array_at(memory, PREFIX, np.int32)
    state = array_at(memory, STATE, np.int64)
    out = bounds[cursor[0]]
    if out + len(prefix) > len(ids):
        return False
    for index in range(len(prefix)):
        ids[out] = prefix[index]
        out += 1
    state[OUT], state[LIMIT] = out, out + cursor[2]
    return True


@inner
def _end_text(memory: Int64) -> bool:
    """Cut the text's ids to what is wanted, write the suffix, go on to the next; False: there is no room."""
    ids, bounds = array_at(memory, IDS, np.int32), array_at(memory, BOUNDS, np.int64)
    cursor, suffix = array_at(memory, CURSOR, np.int64), array_at(memory, SUFFIX, np.int32)
    state = array_at(memory, STATE, np.int64)
    out = min(state[OUT], state[LIMIT])
    if out + len(suffix) > len(ids):
        return False
    for index in range(len(suffix)):
        ids[out] = suffix[index]
        out += 1
    cursor[0] += 1
    bounds[cursor[0]] = out
    return True


def each_word(first: int, make: Callable[..., int]) -> Callable[..., int]:
    """A function that writes the ids of a word from state[OUT] on; it gives OK or ROOM.

    It takes the memory, the word's bytes as an address and a length, and what `make` is given of it. first:
    the number of the first array of Words. make(of, memory, out): writes a word's ids to ids[out:] and gives
    their end, or -1 if there is no room.
    """

    @inner
    def of_each_word(memory: Int64, word: tuple[int, int], of: Any) -> int:
        state, (address, length) = array_at(memory, STATE, np.int64), word
        out = state[OUT]
        if length > MAX_WORD:
            out = make(of, memory, out)
        else:
            key = hash_of(address, length)
            place = find(memory, first, key, address, length)
            if place >= 0:
                out = recall(memory, first, place, array_at(memory, IDS, np.int32), out)
            else:
                out = make(of, memory, out)
                if out >= 0:
                    remember(memory, first, key, word, (state[OUT], out))
        if out < 0:
            return ROOM
        state[OUT] = out
        return OK

    return of_each_word
