"""Byte-level BPE's merges: of all neighbours that may merge those of the lowest rank do, the leftmost first.

Words of up to 64 bytes look for them in a row; longer ones keep a heap, so that a word takes n log n steps.
Of a word that the buffers do not hold, what no later byte can change is written, and forgotten; see `settle`.
Source: Sennrich et al. 2016, arXiv 1508.07909; the `tokenizers` library, models/bpe.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gateway.tokenization.kernels.arrays import IDS, OWN, STATE, Bytes, Int64, UInt8, UInt64, signed
from gateway.tokenization.kernels.jit import array_at, entry, inner
from gateway.tokenization.kernels.texts import OUT
from gateway.tokenization.kernels.trie import exact
from rose.batch import Int32

# Places in the rules. PATTERN: see scanner.PATTERNS. WHOLE: a word that is a token is not merged from bytes.
# NORMALIZED: the text is in this Python's normal form, so code points are referred of which the library has
# another view. LONGEST: bytes of the longest token, if words may be settled in parts, else 0.
PATTERN, WHOLE, NORMALIZED, LONGEST = range(4)

NO_RANK = 1 << 30
_SHORT = 64
_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


class Tables(NamedTuple):
    """classes: u8[0x110000]. leads: u8[256] and added: trie, of tokens that are cut out of the text.

    byte_ids: i32[256]. pairs: u64[2^k], hash table of left id << 32 | right id, plus one. ranks: i32[2^k]
    beside it. merged: i32[m], the id that a merge gives, by rank. tokens: trie of all of them, for WHOLE.
    rules: i64[4].
    """

    classes: UInt8
    leads: UInt8
    added: Int64
    byte_ids: Int32
    pairs: UInt64
    ranks: Int32
    merged: Int32
    tokens: Int64
    rules: Int64


class Scratch(NamedTuple):
    """One word's symbols, i32[w] each: their ids, their ranks with the next one, and both neighbours' places.

    heap: i64[3 w], rank << 32 | place, lowest first.
    """

    ids: Int32
    ranks: Int32
    next: Int32
    previous: Int32
    heap: Int64


CLASSES, LEADS, ADDED, _BYTE_IDS, _PAIRS, _RANKS, _MERGED, _TOKENS, RULES = range(OWN, OWN + 9)
SYMBOLS, _SYMBOL_RANKS, _NEXT, _PREVIOUS, _HEAP, WORDS = range(OWN + 9, OWN + 15)


@inner
def place_of(pairs: UInt64, key: np.uint64) -> int:
    """Where `key` is in the table, or the free place where it would be."""
    mask = len(pairs) - 1
    place = signed((key * _FACTOR) >> _MIX) & mask
    while pairs[place] != 0 and pairs[place] != key:
        place = (place + 1) & mask
    return place


@inner
def pair_key(left: int, right: int) -> np.uint64:
    """The key of two ids, never 0."""
    return np.uint64((left << 32 | right) + 1)


@entry
def fill(pairs: UInt64, ranks: Int32, left: Int32, right: Int32) -> None:
    """Enter the merges in the order of their ranks; of the same pair the last counts."""
    for rank in range(len(left)):
        key = pair_key(signed(left[rank]), signed(right[rank]))
        place = place_of(pairs, key)
        pairs[place], ranks[place] = key, rank


@inner
def _rank(memory: Int64, left: int, right: int) -> int:
    pairs, ranks = array_at(memory, _PAIRS, np.uint64), array_at(memory, _RANKS, np.int32)
    place = place_of(pairs, pair_key(left, right))
    return signed(ranks[place]) if pairs[place] != 0 else NO_RANK


@inner
def _merge_short(memory: Int64, count: int) -> int:
    """Merge the symbols in place; gives how many are left."""
    symbols, ranks = array_at(memory, SYMBOLS, np.int32), array_at(memory, _SYMBOL_RANKS, np.int32)
    merged = array_at(memory, _MERGED, np.int32)
    for at in range(count - 1):
        ranks[at] = _rank(memory, signed(symbols[at]), signed(symbols[at + 1]))
    while count > 1:
        best, where = NO_RANK, -1
        for at in range(count - 1):
            if ranks[at] < best:
                best, where = signed(ranks[at]), at
        if where < 0:
            break
        symbols[where] = merged[best]
        for at in range(where + 1, count - 1):
            symbols[at] = symbols[at + 1]
            ranks[at] = ranks[at + 1]
        count -= 1
        if where > 0:
            ranks[where - 1] = _rank(memory, signed(symbols[where - 1]), signed(symbols[where]))
        if where < count - 1:
            ranks[where] = _rank(memory, signed(symbols[where]), signed(symbols[where + 1]))
    return count


@inner
def _push(heap: Int64, size: int, item: int) -> int:
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if heap[parent] <= item:
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = item
    return size + 1


@inner
def _pop(heap: Int64, size: int) -> int:
    """Take the lowest away, heap[0]; gives the size left."""
    size -= 1
    item, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= item:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item
    return size


@inner
def _enter(memory: Int64, size: int, at: int, right: int) -> int:
    """Rank the pair of the symbols at two places and push it if it merges; gives the heap's size."""
    symbols, ranks = array_at(memory, SYMBOLS, np.int32), array_at(memory, _SYMBOL_RANKS, np.int32)
    rank = _rank(memory, signed(symbols[at]), signed(symbols[right]))
    ranks[at] = rank
    return _push(array_at(memory, _HEAP, np.int64), size, rank << 32 | at) if rank < NO_RANK else size


@inner
def _merge_long(memory: Int64, count: int) -> int:
    """As _merge_short, in n log n steps; and where each symbol that is left begins, in Scratch.previous."""
    symbols, ranks = array_at(memory, SYMBOLS, np.int32), array_at(memory, _SYMBOL_RANKS, np.int32)
    after, before = array_at(memory, _NEXT, np.int32), array_at(memory, _PREVIOUS, np.int32)
    heap, merged = array_at(memory, _HEAP, np.int64), array_at(memory, _MERGED, np.int32)
    size = 0
    for at in range(count):
        after[at], before[at], ranks[at] = at + 1, at - 1, NO_RANK
        if at + 1 < count:
            size = _enter(memory, size, at, at + 1)
    while size > 0:
        best, at = heap[0] >> 32, heap[0] & 0xFFFFFFFF
        size = _pop(heap, size)
        if ranks[at] != best:  # one of the two has merged with another since
            continue
        right, left = signed(after[at]), signed(before[at])
        symbols[at], after[at], ranks[right], ranks[at] = merged[best], after[right], NO_RANK, NO_RANK
        if after[at] < count:
            before[after[at]] = at
            size = _enter(memory, size, at, signed(after[at]))
        if left >= 0:
            size = _enter(memory, size, left, at)
    at = left_over = 0
    while at < count:
        symbols[left_over], before[left_over] = symbols[at], at
        left_over += 1
        at = signed(after[at])
    return left_over


@inner
def _load(text: Bytes, start: int, stop: int, memory: Int64) -> int:
    """Make symbols of the bytes text[start:stop]; gives how many."""
    symbols, byte_ids = array_at(memory, SYMBOLS, np.int32), array_at(memory, _BYTE_IDS, np.int32)
    for at in range(stop - start):
        symbols[at] = byte_ids[text[start + at]]
    return stop - start


@inner
def merge_part(word: tuple[Bytes, int, int], memory: Int64, out: int) -> int:
    """Ids of `word`, a text, start and stop, to ids[out:]; gives their end, or -1 if there is no room."""
    text, start, stop = word
    ids, symbols = array_at(memory, IDS, np.int32), array_at(memory, SYMBOLS, np.int32)
    if out + stop - start > len(ids):
        return -1
    count = _load(text, start, stop, memory)
    count = _merge_short(memory, count) if count <= _SHORT else _merge_long(memory, count)
    for at in range(count):
        ids[out + at] = symbols[at]
    return out + count


@inner
def merge_word(word: tuple[Bytes, int, int], memory: Int64, out: int) -> int:
    """As merge_part, of a whole word, which may be a token."""
    text, start, stop = word
    if array_at(memory, RULES, np.int64)[WHOLE]:
        ids = array_at(memory, IDS, np.int32)
        token = exact(array_at(memory, _TOKENS, np.int64), text, start, stop)
        if token >= 0 and out < len(ids):
            ids[out] = token
            return out + 1
    return merge_part(word, memory, out)


@inner
def settle(text: Bytes, start: int, stop: int, memory: Int64) -> int:
    """Write the ids that text[start:stop] begins with, whatever follows it; gives the end of their bytes.

    That is `start` if none is known. There is room for stop - start ids. One of the whole word's tokens
    begins among the last LONGEST places, and up to there its tokens are those of the part by itself. So a cut
    holds if it is one in every part that ends there. It is if the tokens on both sides of it stay apart when
    they are by themselves: ranks grow from tokens' parts to tokens, so in both all lower ranks come first.
    """
    state, longest = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)[LONGEST]
    symbols, begins = array_at(memory, SYMBOLS, np.int32), array_at(memory, _PREVIOUS, np.int32)
    ids = array_at(memory, IDS, np.int32)
    last = _merge_long(memory, _load(text, start, stop, memory)) - 1
    while last > 0 and begins[last] > stop - start - 2 * longest:
        last -= 1
    if last == 0:
        return start
    for at in range(last):
        ids[state[OUT] + at] = symbols[at]
    cut, before = start + signed(begins[last]), start + signed(begins[last - 1])
    left, apart = signed(symbols[last - 1]), -1
    for end in range(stop - longest + 1, stop + 1):
        count = _merge_long(memory, _load(text, cut, end, memory))
        first, first_end = signed(symbols[0]), cut + signed(begins[1]) if count > 1 else end
        if first != apart:
            if _merge_long(memory, _load(text, before, first_end, memory)) != 2 or symbols[0] != left:
                return start
            apart = first
    state[OUT] += last
    return cut
