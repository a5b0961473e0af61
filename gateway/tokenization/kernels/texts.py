"""What the kernels share: text after text, with the template around its ids, and word after word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gateway.tokenization.kernels.arrays import (
    BOUNDS,
    CODE_BITS,
    CURSOR,
    IDS,
    MOST_ARRAYS,
    OK,
    PREFIX,
    ROOM,
    STATE,
    SUFFIX,
    TEXTS,
    Int64,
    signed,
)
from gateway.tokenization.kernels.jit import array_at, bytes_of, entry_of, inner, inner_of, numbers_at
from gateway.tokenization.kernels.words import MAX_WORD, find, hash_of, recall, remember

# Places in a kernel's state: where the next id goes, where a text's own ids end at the latest, and what is
# missing: the block asked for, or the least bytes of a word.
OUT, LIMIT, MISSING = range(3)


def each_text(encode_text: Callable[..., int]) -> Callable[[bytes, int, int, int, int], int]:
    """Machine code that has encode_text(text, span, memory) write the ids of each text from the `first` on.

    It takes what Kernel.run takes. A function that is handed over when it is called could not be kept.
    """

    @entry_of(encode_text)
    def of_each_text(text: bytes, address: int, num_texts: int, first: int, most: int) -> int:
        memory, blob = numbers_at(address, 2 * MOST_ARRAYS), bytes_of(text)
        state, starts = array_at(memory, STATE, np.int64), array_at(memory, TEXTS, np.int64)
        cursor, bounds = array_at(memory, CURSOR, np.int64), array_at(memory, BOUNDS, np.int64)
        if num_texts == 1:
            starts[1] = len(blob)
        code = OK
        for index in range(first, num_texts):
            code = _begin_text(memory, index, most)
            if code == OK:
                code = encode_text(blob, (starts[index], starts[index + 1]), memory)
            if code == OK:
                code = _end_text(memory, index)
            if code != OK:
                cursor[0], cursor[1] = index, state[MISSING]
                return code
        return signed(bounds[num_texts]) << CODE_BITS

    return of_each_text


@inner
def _begin_text(memory: Int64, index: int, most: int) -> int:
    """Write the template's prefix before a text, which gets so many ids of its own. OK or ROOM."""
    ids, bounds = array_at(memory, IDS, np.int32), array_at(memory, BOUNDS, np.int64)
    prefix, state = array_at(memory, PREFIX, np.int32), array_at(memory, STATE, np.int64)
    out = bounds[index]
    if out + len(prefix) > len(ids):
        return ROOM
    for place in range(len(prefix)):
        ids[out] = prefix[place]
        out += 1
    state[OUT], state[LIMIT] = out, out + most
    return OK


@inner
def _end_text(memory: Int64, index: int) -> int:
    """Cut the text's ids to what is wanted and write the template's suffix. OK or ROOM."""
    ids, bounds = array_at(memory, IDS, np.int32), array_at(memory, BOUNDS, np.int64)
    suffix, state = array_at(memory, SUFFIX, np.int32), array_at(memory, STATE, np.int64)
    out = min(state[OUT], state[LIMIT])
    if out + len(suffix) > len(ids):
        return ROOM
    for place in range(len(suffix)):
        ids[out] = suffix[place]
        out += 1
    bounds[index + 1] = out
    return OK


def each_word(first: int, make: Callable[..., int]) -> Callable[..., int]:
    """A function that writes the ids of a word from state[OUT] on; it gives OK or ROOM.

    It takes the memory, the word's bytes as an address and a length, and what `make` is given of it. first:
    the number of the first array of Words. make(of, memory, out): writes a word's ids to ids[out:] and gives
    their end, or -1 if there is no room.
    """

    @inner_of(make)
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
