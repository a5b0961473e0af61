"""The best path through a word, whole or as far as it is sure; where the Unigram kernel keeps what it has.

A word is a row of labels, numbers that the vocabulary's characters have, the most frequent the lowest: so a
character of three bytes is one step in the trie, and the nodes of frequent ones are side by side.
"""

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
    UInt16,
    UInt32,
    signed,
    unsigned,
)
from gateway.tokenization.kernels.jit import array_at, inner
from gateway.tokenization.kernels.texts import MISSING, OUT
from gateway.tokenization.kernels.trie import BASE_AT, ID, ID_AT, LABEL, child_of, id_of
from rose.batch import Int32

# Places in the rules. PREFIXES: words get a "▁" in front; the text's first only, if not SPLIT_SPACES.
# COLLAPSE: a run of spaces is one. STRIP: spaces at the end go. SPLIT_SPACES: spaces part words and go.
# SPLIT: each "▁" begins a word. BYTE_FALLBACK: characters that no piece has become pieces of bytes, else the
# UNKNOWN_ID. LONGEST: characters of the longest piece.
PREFIXES, COLLAPSE, STRIP, SPLIT_SPACES, SPLIT, BYTE_FALLBACK, UNKNOWN_ID, LONGEST = range(8)


class Tables(NamedTuple):
    """trie: i64[m] of the pieces' labels. scores: f64[n + 1], an unknown's, then those of the ids.

    points: u32[k], the code points of the labels. byte_ids: i32[256]. added: trie of the tokens that are cut
    out of the raw text before all else. rules: i64[8].
    """

    trie: Int64
    scores: Float64
    points: UInt32
    byte_ids: Int32
    added: Int64
    rules: Int64


class Scratch(NamedTuple):
    """One thread's own memory. word: u16[w], a word's labels, 0 for a character without one.

    odd: u32[w], the code points of those. The best path to each place of the word: score f64[w + 1], and back
    i64[w + 1], where its last piece starts << 32 | the id.
    """

    word: UInt16
    odd: UInt32
    score: Float64
    back: Int64


# Numbers of the arrays: of Charsmap, of Tables, of Scratch and of Words.
UNITS, POOL, CHARACTERS, ASCII, LEADS, PLAIN = range(OWN, OWN + 6)
TRIE, SCORES, POINTS, BYTE_IDS, ADDED, RULES = range(OWN + 6, OWN + 12)
LABELS, ODD, SCORE, BACK, WORDS = range(OWN + 12, OWN + 17)

# What the state holds after MISSING. AT: the place in the text. ALONE: code points before this place are
# looked up one by one. USED: characters of the word. HAS_ODD: one of them has no label. FRESH: the next one
# is the first, a "▁" may be due. MARK: it is a "▁". SPACES: so many wait. TRIED: the first place of the word
# whose pieces are not tried yet, 0 in a word of which none are. REACHED: the last that was cleared for that.
AT, ALONE, USED, HAS_ODD, FRESH, MARK, SPACES, TRIED, REACHED = range(MISSING + 1, MISSING + 10)
# Free places of a word's buffer that one character, with what stands before it, may take.
SLACK = 96
_IMPOSSIBLE = -np.inf
_ID_OF = 0xFFFFFFFF


@inner
def _clear(memory: Int64, tried: int, stop: int) -> None:
    """Make the places up to `stop` that are not yet ready for paths to them. tried: see TRIED."""
    score, state = array_at(memory, SCORE, np.float64), array_at(memory, STATE, np.int64)
    if tried == 0:
        score[0], state[REACHED] = 0.0, 0
    for place in range(state[REACHED] + 1, stop + 1):
        score[unsigned(place)] = _IMPOSSIBLE
    state[REACHED] = stop


@inner
def _search(memory: Int64, last: int, stop: int) -> None:
    """Try the pieces that begin at state[TRIED] and at later places before `last`, in labels up to `stop`."""
    word, score = array_at(memory, LABELS, np.uint16), array_at(memory, SCORE, np.float64)
    back, trie = array_at(memory, BACK, np.int64), array_at(memory, TRIE, np.int64)
    scores, state = array_at(memory, SCORES, np.float64), array_at(memory, STATE, np.int64)
    unknown, root = array_at(memory, RULES, np.int64)[UNKNOWN_ID], trie[0]
    here = state[TRIED]
    _clear(memory, here, stop)
    while here < last:
        so_far, start = score[unsigned(here)], here << 32
        node = child_of(trie, root, signed(word[unsigned(here)]))
        here += 1
        # The first score is an unknown's: every character is one, unless it is a piece by itself.
        piece = (node >> ID_AT) & ID
        total = scores[unsigned(piece)] + so_far
        if total > score[unsigned(here)]:
            score[unsigned(here)] = total
            back[unsigned(here)] = start | (piece - 1 if piece > 0 else unknown)
        at = here
        while at < stop:
            label = signed(word[unsigned(at)])
            node = trie[unsigned((node >> BASE_AT) + label)]
            if node & LABEL != label:
                break
            at += 1
            piece = (node >> ID_AT) & ID
            if piece > 0:
                total = scores[unsigned(piece)] + so_far
                if total > score[unsigned(at)]:
                    score[unsigned(at)], back[unsigned(at)] = total, start | (piece - 1)
    state[TRIED] = here


@inner
def best_path(stop: int, memory: Int64, out: int) -> int:
    """Ids of the word up to `stop` to ids[out:]; gives the end of them, or -1 if there is no room."""
    _search(memory, stop, stop)
    return _walk_back(memory, stop, out)


@inner
def _parting(memory: Int64, stop: int) -> int:
    """A place through which every path goes, whatever follows the labels up to `stop`; 0: none is known.

    Each leads through a place from state[TRIED] on whose best piece begins before it, so all do if the best
    paths to those meet. Unknown characters may be one token with what follows, so no place behind one.
    """
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    score, back = array_at(memory, SCORE, np.float64), array_at(memory, BACK, np.int64)
    tried, meet = state[TRIED], -1
    for place in range(tried, stop + 1):
        if score[place] == _IMPOSSIBLE:
            continue
        at = place
        while at >= tried:
            at = back[at] >> 32
        if meet < 0:
            meet = at
        while at != meet:
            if at > meet:
                at = back[at] >> 32
            else:
                meet = back[meet] >> 32
    while meet > 0 and back[meet] & _ID_OF == rules[UNKNOWN_ID]:
        meet = back[meet] >> 32
    return max(meet, 0)


@inner
def settle(memory: Int64) -> int:
    """Write the ids of as much of a full word as is sure. Gives OK, ROOM, or WORD if nothing is."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    word, score = array_at(memory, LABELS, np.uint16), array_at(memory, SCORE, np.float64)
    odd, back = array_at(memory, ODD, np.uint32), array_at(memory, BACK, np.int64)
    stop = state[USED]
    _search(memory, max(stop - rules[LONGEST], state[TRIED]), stop)
    cut = _parting(memory, stop)
    if cut == 0:
        return WORD
    out = _walk_back(memory, cut, state[OUT])
    if out < 0:
        return ROOM
    for place in range(cut, stop):
        word[place - cut], odd[place - cut] = word[place], odd[place]
    for place in range(cut, stop + 1):
        # What began before the cut is of no path that goes on from here.
        score[place - cut], back[place - cut] = score[place], max(back[place] - (cut << 32), 0)
    state[OUT], state[USED], state[REACHED] = out, stop - cut, stop - cut
    state[TRIED] -= cut
    return OK


@inner
def _walk_back(memory: Int64, stop: int, out: int) -> int:
    """Write the best path's ids; unknown neighbours become one token, or the tokens of their bytes."""
    ids, back = array_at(memory, IDS, np.int32), array_at(memory, BACK, np.int64)
    rules = array_at(memory, RULES, np.int64)
    unknown, room = rules[UNKNOWN_ID], len(ids)
    first, at = out, stop
    while at > 0:
        step = back[unsigned(at)]
        begin, token = step >> 32, step & _ID_OF
        if token == unknown:
            while begin > 0 and back[begin] & _ID_OF == unknown:
                begin = back[begin] >> 32
            if rules[BYTE_FALLBACK] and not _is_piece(memory, begin, at):
                out = _bytes_back(memory, begin, at, out)
                if out < 0:
                    return -1
                at = begin
                continue
        if out >= room:
            return -1
        ids[unsigned(out)] = token
        out += 1
        at = begin
    last = out - 1
    while first < last:
        ids[unsigned(first)], ids[unsigned(last)] = ids[unsigned(last)], ids[unsigned(first)]
        first += 1
        last -= 1
    return out


@inner
def _is_piece(memory: Int64, begin: int, end: int) -> bool:
    word, trie = array_at(memory, LABELS, np.uint16), array_at(memory, TRIE, np.int64)
    node = trie[0]
    for place in range(begin, end):
        node = child_of(trie, node, signed(word[place]))
        if node == 0:
            return False
    return id_of(node) >= 0


@inner
def _bytes_back(memory: Int64, begin: int, end: int, out: int) -> int:
    """Write the tokens of the bytes of the word's characters, the last first; -1 if there is no room."""
    ids, byte_ids = array_at(memory, IDS, np.int32), array_at(memory, BYTE_IDS, np.int32)
    word, odd = array_at(memory, LABELS, np.uint16), array_at(memory, ODD, np.uint32)
    points = array_at(memory, POINTS, np.uint32)
    for place in range(end - 1, begin - 1, -1):
        label = signed(word[place])
        point = signed(points[label]) if label > 0 else signed(odd[place])
        if out + 4 > len(ids):
            return -1
        size = 1 + (point > 0x7F) + (point > 0x7FF) + (point > 0xFFFF)
        for _ in range(size - 1):
            ids[out] = byte_ids[0x80 | point & 0x3F]
            point >>= 6
            out += 1
        ids[out] = byte_ids[(0xF00 >> size) & 0xF0 | point] if size > 1 else byte_ids[point]
        out += 1
    return out
