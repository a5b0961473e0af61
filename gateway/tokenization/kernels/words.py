"""Words seen lately and their ids: most words of most texts are among a few thousand.

An open table of 64-bit hashes; a hit compares the bytes, so that no collision, made or met, gives wrong ids.
Probes are bounded, so that no choice of words makes it slow; a full arena starts the table afresh.
"""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import IDS, Int64, UInt8, Words, signed
from gateway.tokenization.kernels.jit import array_at, inner
from rose.batch import Int32

_SLOTS, _KEY_BYTES, _VALUES = 1 << 15, 1 << 19, 1 << 17
MAX_WORD = 96
_PROBES = 4
_SEED, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)
_MASK = np.uint64(_SLOTS - 1)
_HALF, _ONE = np.uint64(32), np.uint64(1)


def new_words() -> Words:
    """An empty table, 1.8 MB."""
    return Words(
        np.zeros(3 * _SLOTS, np.uint64),
        np.empty(_KEY_BYTES, np.uint8),
        np.empty(_VALUES, np.int32),
        np.zeros(2, np.int64),
    )


@inner
def hash_of(text: UInt8, start: int, stop: int) -> np.uint64:
    """A hash of text[start:stop], never 0."""
    value = _SEED
    for at in range(start, stop):
        value = (value ^ np.uint64(text[at])) * _FACTOR
        value ^= value >> _HALF
    return value | _ONE


@inner
def find(memory: Int64, first: int, key: np.uint64, text: UInt8, span: tuple[int, int]) -> int:
    """The slot of the word text[span] of hash `key`, or -1. first: the number of the table's first array."""
    slots, keys = array_at(memory, first, np.uint64), array_at(memory, first + 1, np.uint8)
    start, length = span[0], span[1] - span[0]
    for probe in range(_PROBES):
        slot = 3 * signed(((key >> _HALF) + np.uint64(probe)) & _MASK)
        if slots[slot] == key:
            where = signed(slots[slot + 1])
            if where & 0xFFFF == length:
                at = where >> 16
                same = True
                for index in range(length):
                    if keys[at + index] != text[start + index]:
                        same = False
                        break
                if same:
                    return slot
        elif slots[slot] == 0:
            return -1
    return -1


@inner
def recall(memory: Int64, first: int, slot: int, ids: Int32, at: int) -> int:
    """Copy the ids of the word in `slot` to ids[at:]; gives the end of them, or -1 if there is no room."""
    slots, values = array_at(memory, first, np.uint64), array_at(memory, first + 2, np.int32)
    where = signed(slots[slot + 2])
    start, count = where >> 16, where & 0xFFFF
    if at + count > len(ids):
        return -1
    for index in range(count):
        ids[at + index] = values[start + index]
    return at + count


@inner
def remember(
    memory: Int64, first: int, key: np.uint64, text: UInt8, span: tuple[int, int], out: tuple[int, int]
) -> None:
    """Keep that the word text[span] of hash `key`, at most MAX_WORD bytes, has the ids Output.ids[out]."""
    slots, keys = array_at(memory, first, np.uint64), array_at(memory, first + 1, np.uint8)
    values, used = array_at(memory, first + 2, np.int32), array_at(memory, first + 3, np.int64)
    ids = array_at(memory, IDS, np.int32)
    length, count = span[1] - span[0], out[1] - out[0]
    if used[0] + length > len(keys) or used[1] + count > len(values):
        for index in range(len(slots)):
            slots[index] = 0
        used[0] = used[1] = 0
    slot = 3 * signed((key >> _HALF) & _MASK)
    for probe in range(_PROBES):
        candidate = 3 * signed(((key >> _HALF) + np.uint64(probe)) & _MASK)
        if slots[candidate] == 0:
            slot = candidate
            break
    at, value_at = used[0], used[1]
    for index in range(length):
        keys[at + index] = text[span[0] + index]
    for index in range(count):
        values[value_at + index] = ids[out[0] + index]
    slots[slot] = key
    slots[slot + 1] = np.uint64(at << 16 | length)
    slots[slot + 2] = np.uint64(value_at << 16 | count)
    used[0] += length
    used[1] += count
