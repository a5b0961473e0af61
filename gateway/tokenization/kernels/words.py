"""Words seen lately and their ids: most words of most texts are among a few thousand.

A word is bytes at an address, in a text or in a buffer. An open table has half of a word's hash and where the
word and its ids are; a hit compares the bytes, so that no collision, made or met, gives wrong ids. Probes are
bounded, so that no choice of words makes it slow; a full arena starts the table afresh.
"""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import IDS, Int64, Words, signed, unsigned
from gateway.tokenization.kernels.jit import array_at, bytes_at, inner, load
from rose.batch import Int32

MAX_WORD = 96  # bytes
_SLOTS, _ARENA = 1 << 15, 1 << 18
_PROBES = 4
_SEED, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def new_words() -> Words:
    """An empty table, 1.3 MB."""
    return Words(np.zeros(_SLOTS, np.uint64), np.empty(_ARENA, np.int32), np.zeros(1, np.int64))


@inner
def _mixed(value: np.uint64, word: np.uint64) -> np.uint64:
    value = (value ^ word) * _FACTOR
    return value ^ (value >> _HALF)


@inner
def _few(address: int, length: int) -> np.uint64:
    """One to seven bytes as a number that no others of that length have."""
    if length >= 4:
        return load(address, np.uint32) | load(address + length - 4, np.uint32) << _HALF
    if length >= 2:
        return load(address, np.uint16) | load(address + length - 2, np.uint16) << _HALF
    return load(address, np.uint8)


@inner
def hash_of(address: int, length: int) -> np.uint64:
    """A hash of at least one byte."""
    value = _SEED ^ np.uint64(length)
    if length < 8:
        return _mixed(value, _few(address, length))
    last = address + length - 8
    while address < last:
        value = _mixed(value, load(address, np.uint64))
        address += 8
    return _mixed(value, load(last, np.uint64))


@inner
def _same(one: int, other: int, length: int) -> bool:
    if length < 8:
        return bool(_few(one, length) == _few(other, length))
    last = length - 8
    for at in range(0, last, 8):
        if load(one + at, np.uint64) != load(other + at, np.uint64):
            return False
    return bool(load(one + last, np.uint64) == load(other + last, np.uint64))


@inner
def find(memory: Int64, first: int, key: np.uint64, address: int, length: int) -> int:
    """Where in the arena the word of hash `key` is, or -1. first: the number of the table's first array."""
    slots, arena = array_at(memory, first, np.uint64), array_at(memory, first + 1, np.int32)
    start = memory[2 * (first + 1)]
    for probe in range(_PROBES):
        slot = slots[unsigned((signed(key & _LOW) + probe) & (_SLOTS - 1))]
        if slot == 0:
            break
        if slot >> _HALF == key >> _HALF:
            place = signed(slot & _LOW)
            if signed(arena[place]) >> 16 == length and _same(start + 4 * place + 4, address, length):
                return place
    return -1


@inner
def _size(length: int) -> int:
    """Places of a word's bytes in the arena."""
    return (length + 3) >> 2


@inner
def recall(memory: Int64, first: int, place: int, ids: Int32, at: int) -> int:
    """Copy the ids of the word at `place` to ids[at:]; gives the end of them, or -1 if there is no room."""
    arena = array_at(memory, first + 1, np.int32)
    header = signed(arena[place])
    count, start = header & 0xFFFF, place + 1 + _size(header >> 16)
    if at + count > len(ids):
        return -1
    for index in range(count):
        ids[unsigned(at + index)] = arena[unsigned(start + index)]
    return at + count


@inner
def remember(memory: Int64, first: int, key: np.uint64, word: tuple[int, int], out: tuple[int, int]) -> None:
    """Keep that the word of hash `key`, its address and length, has the ids Output.ids[out]."""
    slots, arena = array_at(memory, first, np.uint64), array_at(memory, first + 1, np.int32)
    used, ids = array_at(memory, first + 2, np.int64), array_at(memory, IDS, np.int32)
    (address, length), count = word, out[1] - out[0]
    size = 1 + _size(length) + count
    if used[0] + size > len(arena):
        for index in range(len(slots)):
            slots[index] = 0
        used[0] = 0
    chosen = signed(key & _LOW) & (_SLOTS - 1)
    for probe in range(_PROBES):
        slot = (signed(key & _LOW) + probe) & (_SLOTS - 1)
        if slots[slot] == 0:
            chosen = slot
            break
    place = used[0]
    slots[chosen] = (key >> _HALF) << _HALF | np.uint64(place)
    arena[place] = length << 16 | count
    kept = bytes_at(memory[2 * (first + 1)] + 4 * place + 4, length)
    for index, byte in enumerate(bytes_at(address, length)):
        kept[index] = byte
    for index in range(count):
        arena[place + 1 + _size(length) + index] = ids[out[0] + index]
    used[0] += size
