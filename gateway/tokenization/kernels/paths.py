"""The best path through a word, whole or as far as it is sure; where the Unigram kernel keeps what it has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gateway.tokenization.kernels.arrays import (
    IDS,
    OK,
    OWN,
    ROOM,
    STATE,
    WORD,
    Float64,
    Int64,
    UInt8,
    signed,
)
from gateway.tokenization.kernels.jit import array_at, inner
from gateway.tokenization.kernels.texts import OUT
from gateway.tokenization.kernels.trie import child_of, exact, id_of
from gateway.tokenization.kernels.utf8 import width
from rose.batch import Int32

# Places in the rules. PREFIXES: words get a "▁" in front; the text's first only, if not SPLIT_SPACES.
# COLLAPSE: a run of spaces is one. STRIP: spaces at the end go. SPLIT_SPACES: spaces part words and go.
# SPLIT: each "▁" begins a word. BYTE_FALLBACK: characters that no piece has become pieces of bytes, else the
# UNKNOWN_ID. LONGEST: bytes of the longest piece, or of a character.
PREFIXES, COLLAPSE, STRIP, SPLIT_SPACES, SPLIT, BYTE_FALLBACK, UNKNOWN_ID, LONGEST = range(8)


class Tables(NamedTuple):
    """trie: i64[m] of the pieces. scores: f64[n + 1] by id, then an unknown's. byte_ids: i32[256].

    added: trie of the tokens that are cut out of the raw text before all else. rules: i64[8].
    """

    trie: Int64
    scores: Float64
    byte_ids: Int32
    added: Int64
    rules: Int64


class Scratch(NamedTuple):
    """One thread's own memory. word: u8[w], a word's bytes.

    The best path to each of its places: score f64[w + 1], start i32[w + 1] of its last piece, id i32[w + 1].
    """

    word: UInt8
    score: Float64
    start: Int32
    id: Int32


# Numbers of the arrays: of Charsmap, of Tables, of Scratch and of Words.
UNITS, POOL, CLASSES, ASCII, LEADS, PLAIN = range(OWN, OWN + 6)
TRIE, SCORES, BYTE_IDS, ADDED, RULES = range(OWN + 6, OWN + 11)
WORD_BYTES, SCORE, START, PIECE, WORDS = range(OWN + 11, OWN + 16)

# What the state holds after OUT and LIMIT. AT: the place in the text. ALONE: code points before this place
# are looked up one by one. USED: bytes of the word. FRESH: the next byte is the first, a "▁" may be due.
# BEGIN, END, POOLED: what is to be written. MARK: it is a "▁". MISSING: the block asked for. SPACES: so
# many wait. TRIED: the first place of the word whose pieces are not tried yet, 0 in a word of which none are.
# REACHED: the last place that has been cleared for that.
AT, ALONE, USED, FRESH, BEGIN, END, POOLED, MARK, MISSING, SPACES, TRIED, REACHED = range(2, 14)
# Free bytes of a word's buffer that one character, with what stands before it, may take.
SLACK = 96


@inner
def _search(memory: Int64, last: int, stop: int) -> None:
    """Try the pieces that begin at state[TRIED] and at later places before `last`, in bytes up to `stop`."""
    word, score = array_at(memory, WORD_BYTES, np.uint8), array_at(memory, SCORE, np.float64)
    start, ids_at = array_at(memory, START, np.int32), array_at(memory, PIECE, np.int32)
    trie, scores = array_at(memory, TRIE, np.int64), array_at(memory, SCORES, np.float64)
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    unknown, unknown_score = rules[UNKNOWN_ID], scores[len(scores) - 1]
    root, here = trie[0], state[TRIED]
    if here == 0:
        score[0], state[REACHED] = 0.0, 0
    for place in range(state[REACHED] + 1, stop + 1):
        start[place] = -1
    state[REACHED] = stop
    while here < last:
        so_far = score[here]
        end = here + width(signed(word[here]))
        known = False
        node, at = root, here
        while at < stop:
            node = child_of(trie, node, signed(word[at]))
            if node == 0:
                break
            at += 1
            piece = id_of(node)
            if piece >= 0:
                total = scores[piece] + so_far
                if start[at] < 0 or total > score[at]:
                    score[at], start[at], ids_at[at] = total, here, piece
                if at == end:
                    known = True
        if not known:
            total = unknown_score + so_far
            if start[end] < 0 or total > score[end]:
                score[end], start[end], ids_at[end] = total, here, unknown
        here = end
    state[TRIED] = here


@inner
def best_path(memory: Int64, stop: int, out: int) -> int:
    """Ids of the word's bytes up to `stop` to ids[out:]; gives the end of them, or -1 if there is no room."""
    _search(memory, stop, stop)
    return _walk_back(memory, stop, out)


@inner
def _parting(memory: Int64, stop: int) -> int:
    """A place through which every path goes, whatever follows the bytes up to `stop`; 0: none is known.

    Each leads through a place from state[TRIED] on whose best piece begins before it, so all do if the best
    paths to those meet. Unknown characters may be one token with what follows, so no place behind one.
    """
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    start, ids_at = array_at(memory, START, np.int32), array_at(memory, PIECE, np.int32)
    tried, meet = state[TRIED], -1
    for place in range(tried, stop + 1):
        if start[place] < 0:
            continue
        at = place
        while at >= tried:
            at = signed(start[at])
        if meet < 0:
            meet = at
        while at != meet:
            if at > meet:
                at = signed(start[at])
            else:
                meet = signed(start[meet])
    while meet > 0 and ids_at[meet] == rules[UNKNOWN_ID]:
        meet = signed(start[meet])
    return max(meet, 0)


@inner
def settle(memory: Int64) -> int:
    """Write the ids of as much of a full word as is sure. Gives OK, ROOM, or WORD if nothing is."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    word, score = array_at(memory, WORD_BYTES, np.uint8), array_at(memory, SCORE, np.float64)
    start, ids_at = array_at(memory, START, np.int32), array_at(memory, PIECE, np.int32)
    stop = state[USED]
    _search(memory, max(stop - rules[LONGEST], state[TRIED]), stop)
    cut = _parting(memory, stop)
    if cut == 0:
        return WORD
    out = _walk_back(memory, cut, state[OUT])
    if out < 0:
        return ROOM
    for place in range(cut, stop):
        word[place - cut] = word[place]
    for place in range(cut, stop + 1):
        score[place - cut], ids_at[place - cut] = score[place], ids_at[place]
        start[place - cut] = start[place] - cut if start[place] >= cut else -1
    state[OUT], state[USED], state[REACHED] = out, stop - cut, stop - cut
    state[TRIED] -= cut
    return OK


@inner
def _walk_back(memory: Int64, stop: int, out: int) -> int:
    """Write the best path's ids; unknown neighbours become one token, or the tokens of their bytes."""
    word, start, ids_at = (
        array_at(memory, WORD_BYTES, np.uint8),
        array_at(memory, START, np.int32),
        array_at(memory, PIECE, np.int32),
    )
    ids, rules = array_at(memory, IDS, np.int32), array_at(memory, RULES, np.int64)
    unknown = rules[UNKNOWN_ID]
    first, at = out, stop
    while at > 0:
        begin = signed(start[at])
        token = ids_at[at]
        if token == unknown:
            while begin > 0 and ids_at[begin] == unknown:
                begin = signed(start[begin])
            if rules[BYTE_FALLBACK] and exact(array_at(memory, TRIE, np.int64), word, begin, at) < 0:
                if out + at - begin > len(ids):
                    return -1
                byte_ids = array_at(memory, BYTE_IDS, np.int32)
                for place in range(at - 1, begin - 1, -1):
                    ids[out] = byte_ids[word[place]]
                    out += 1
                at = begin
                continue
        if out >= len(ids):
            return -1
        ids[out] = token
        out += 1
        at = begin
    last = out - 1
    while first < last:
        ids[first], ids[last] = ids[last], ids[first]
        first += 1
        last -= 1
    return out
