"""Unigram from raw text to ids in one pass: normalise, split into words, and the best path through each word.

The best path is the reference's to the bit: scores are added in float64 from the word's start, of two paths
as good the one found first stays, and neighbouring unknown characters are one token.
Source: Kudo 2018, arXiv 1804.10959; the `tokenizers` library, models/unigram.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gateway.tokenization.kernels.arrays import (
    BLOCK,
    CURSOR,
    IDS,
    OK,
    OWN,
    REFER,
    ROOM,
    STATE,
    UNKNOWN,
    WORD,
    Bytes,
    Float64,
    Int64,
    UInt8,
    signed,
)
from gateway.tokenization.kernels.charsmap import (
    BLANK,
    CONTROL,
    JOINS,
    MAPPED,
    OPENS,
    PREPENDS,
    RISKY,
    shortest,
)
from gateway.tokenization.kernels.jit import array_at, entry, inner
from gateway.tokenization.kernels.texts import LIMIT, OUT, begin_text, end_text
from gateway.tokenization.kernels.trie import child_of, exact, id_of, starts_key
from gateway.tokenization.kernels.utf8 import before, code_point, width
from gateway.tokenization.kernels.words import MAX_WORD, find, hash_of, recall, remember
from rose.batch import Int32

_SPACE = 0x20
_UNDERLINE = 0x2581  # "▁", E2 96 81
# First byte of the lowest mark that joins, U+0300.
_MARK_LEAD = 0xCC
_ZERO_WIDTH_JOINER = 0x200D
_NEWLINE, _RETURN = 10, 13
# Of code points that may become something else; an UNKNOWN one has all of these.
_CHANGES = MAPPED | OPENS | BLANK


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
_UNITS, _POOL, _CLASSES, _ASCII, _LEADS, _PLAIN = range(OWN, OWN + 6)
_TRIE, _SCORES, _BYTE_IDS, _ADDED, _RULES = range(OWN + 6, OWN + 11)
_WORD, _SCORE, _START, _ID, _WORDS = range(OWN + 11, OWN + 16)

# What the state holds after OUT and LIMIT. AT: the place in the text. ALONE: code points before this place
# are looked up one by one. USED: bytes of the word. FRESH: the next byte is the first, a "▁" may be due.
# BEGIN, END, POOLED: what is to be written. MARK: it is a "▁". MISSING: the block asked for. SPACES: so
# many wait. TRIED: the first place of the word whose pieces are not tried yet, 0 in a word of which none are.
# REACHED: the last place that has been cleared for that.
_AT, _ALONE, _USED, _FRESH, _BEGIN, _END, _POOLED, _MARK, _MISSING, _SPACES, _TRIED, _REACHED = range(2, 14)
# Free bytes of a word's buffer that one character, with what stands before it, may take.
_SLACK = 96


@inner
def _search(memory: Int64, last: int, stop: int) -> None:
    """Try the pieces that begin at state[TRIED] and at later places before `last`, in bytes up to `stop`."""
    word, score = array_at(memory, _WORD, np.uint8), array_at(memory, _SCORE, np.float64)
    start, ids_at = array_at(memory, _START, np.int32), array_at(memory, _ID, np.int32)
    trie, scores = array_at(memory, _TRIE, np.int64), array_at(memory, _SCORES, np.float64)
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, _RULES, np.int64)
    unknown, unknown_score = rules[UNKNOWN_ID], scores[len(scores) - 1]
    root, here = trie[0], state[_TRIED]
    if here == 0:
        score[0], state[_REACHED] = 0.0, 0
    for place in range(state[_REACHED] + 1, stop + 1):
        start[place] = -1
    state[_REACHED] = stop
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
    state[_TRIED] = here


@inner
def _best_path(memory: Int64, stop: int, out: int) -> int:
    """Ids of the word's bytes up to `stop` to ids[out:]; gives the end of them, or -1 if there is no room."""
    _search(memory, stop, stop)
    return _walk_back(memory, stop, out)


@inner
def _parting(memory: Int64, stop: int) -> int:
    """A place through which every path goes, whatever follows the bytes up to `stop`; 0: none is known.

    Each leads through a place from state[TRIED] on whose best piece begins before it, so all do if the best
    paths to those meet. Unknown characters may be one token with what follows, so no place behind one.
    """
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, _RULES, np.int64)
    start, ids_at = array_at(memory, _START, np.int32), array_at(memory, _ID, np.int32)
    tried, meet = state[_TRIED], -1
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
def _settle(memory: Int64) -> int:
    """Write the ids of as much of a full word as is sure. Gives OK, ROOM, or WORD if nothing is."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, _RULES, np.int64)
    word, score = array_at(memory, _WORD, np.uint8), array_at(memory, _SCORE, np.float64)
    start, ids_at = array_at(memory, _START, np.int32), array_at(memory, _ID, np.int32)
    stop = state[_USED]
    _search(memory, max(stop - rules[LONGEST], state[_TRIED]), stop)
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
    state[OUT], state[_USED], state[_REACHED] = out, stop - cut, stop - cut
    state[_TRIED] -= cut
    return OK


@inner
def _walk_back(memory: Int64, stop: int, out: int) -> int:
    """Write the best path's ids; unknown neighbours become one token, or the tokens of their bytes."""
    word, start, ids_at = (
        array_at(memory, _WORD, np.uint8),
        array_at(memory, _START, np.int32),
        array_at(memory, _ID, np.int32),
    )
    ids, rules = array_at(memory, IDS, np.int32), array_at(memory, _RULES, np.int64)
    unknown = rules[UNKNOWN_ID]
    first, at = out, stop
    while at > 0:
        begin = signed(start[at])
        token = ids_at[at]
        if token == unknown:
            while begin > 0 and ids_at[begin] == unknown:
                begin = signed(start[begin])
            if rules[BYTE_FALLBACK] and exact(array_at(memory, _TRIE, np.int64), word, begin, at) < 0:
                if out + at - begin > len(ids):
                    return -1
                byte_ids = array_at(memory, _BYTE_IDS, np.int32)
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


@inner
def _end_word(memory: Int64) -> int:
    """Write the ids of the word, if it has bytes, and begin another. Gives OK or ROOM."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, _WORD, np.uint8)
    stop, out = state[_USED], state[OUT]
    if stop == 0:
        return OK
    if stop > MAX_WORD or state[_TRIED] > 0:  # the end of a long one is no word of its own
        out = _best_path(memory, stop, out)
    else:
        key = hash_of(word, 0, stop)
        slot = find(memory, _WORDS, key, word, (0, stop))
        if slot >= 0:
            out = recall(memory, _WORDS, slot, array_at(memory, IDS, np.int32), out)
        else:
            out = _best_path(memory, stop, out)
            if out >= 0:
                remember(memory, _WORDS, key, word, (0, stop), (state[OUT], out))
    if out < 0:
        return ROOM
    state[_USED], state[_TRIED], state[OUT] = 0, 0, out
    return OK


@inner
def _depends(text: Bytes, span: tuple[int, int], start: int, stop: int, classes: UInt8) -> bool:
    """Whether the grapheme text[start:stop] may be part of a longer one."""
    if start > span[0]:
        previous = code_point(text, before(text, start))
        if previous == _ZERO_WIDTH_JOINER or classes[previous] & PREPENDS:
            return True
    return stop < span[1] and code_point(text, before(text, stop)) == _ZERO_WIDTH_JOINER


@inner
def _next_character(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """Read the character at state[AT], or the grapheme if it has a normal form as one; see _encode_text.

    Moves state[AT] behind it, and sets what is to be written: state[BEGIN] to state[END] of the text, or of
    the pool if state[POOLED]. Gives OK, BLOCK or REFER.
    """
    state, classes = array_at(memory, STATE, np.int64), array_at(memory, _CLASSES, np.uint8)
    units = array_at(memory, _UNITS, np.uint32)
    at, stop = state[_AT], span[1]
    point = code_point(text, at)
    kind = signed(classes[point])
    if kind == UNKNOWN:
        state[_MISSING] = point >> 8
        return BLOCK
    after = at + width(signed(text[at]))
    group, found = after, -1
    if at >= state[_ALONE] and not (kind & CONTROL and point != _RETURN):
        while group < stop:
            joining = code_point(text, group)
            if classes[joining] == UNKNOWN:
                state[_MISSING] = joining >> 8
                return BLOCK
            if point == _RETURN:
                if joining != _NEWLINE or group > after:
                    break
            elif not classes[joining] & JOINS:
                break
            group += width(signed(text[group]))
    if group > after:
        if group - at < 6 and kind & (MAPPED | OPENS):
            found = shortest(units, text, at, group)
        if found >= 0:
            if kind & RISKY or _depends(text, span, at, group, classes):
                return REFER
            after = group
        else:
            state[_ALONE] = group
    if found < 0 and kind & MAPPED:
        found = shortest(units, text, at, after)
    if found < 0 and kind & BLANK:
        rules = array_at(memory, _RULES, np.int64)
        if rules[STRIP]:
            return REFER
        if rules[SPLIT_SPACES]:
            state[_SPACES] += 1
            state[_BEGIN], state[_END], state[_AT] = 0, 0, after
            return OK
    _to_write(memory, found, after)
    state[_MARK] = point == _UNDERLINE and found < 0
    return OK


@inner
def _to_write(memory: Int64, found: int, after: int) -> None:
    """The string of the pool at `found`, or, if that is negative, the text itself, up to `after`."""
    state, pool = array_at(memory, STATE, np.int64), array_at(memory, _POOL, np.uint8)
    if found >= 0:
        end = found
        while pool[end] != 0:
            end += 1
        state[_POOLED], state[_BEGIN], state[_END] = 1, found, end
    else:
        state[_POOLED], state[_BEGIN], state[_END] = 0, state[_AT], after
    state[_AT] = after


@inner
def _mark(memory: Int64) -> None:
    """Write "▁"."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, _WORD, np.uint8)
    used = state[_USED]
    word[used], word[used + 1], word[used + 2] = 0xE2, 0x96, 0x81
    state[_USED] = used + 3


@inner
def _blanks(memory: Int64) -> int:
    """Write the spaces that wait, each a "▁" that begins a word; or end the word. Gives OK, ROOM or WORD."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, _RULES, np.int64)
    room = len(array_at(memory, _WORD, np.uint8)) - _SLACK
    if rules[SPLIT_SPACES]:
        state[_FRESH] = 1
        return _end_word(memory)
    count = 1 if rules[COLLAPSE] else state[_SPACES]
    for _ in range(count):
        if rules[SPLIT]:
            code = _end_word(memory)
            if code != OK:
                return code
        if state[_USED] > room:
            return WORD
        _mark(memory)
    state[_FRESH] = 0
    return OK


@inner
def _begin_byte(memory: Int64) -> int:
    """What comes before a byte that is no space: spaces that wait, the prefix, the end of the word before."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, _RULES, np.int64)
    code = OK
    if state[_SPACES] > 0:
        code = _blanks(memory)
        state[_SPACES] = 0
    if state[_FRESH]:
        state[_FRESH] = 0
        if rules[PREFIXES] and not state[_MARK]:
            _mark(memory)
    elif state[_MARK] and rules[SPLIT] and code == OK:
        code = _end_word(memory)
    state[_MARK] = 0
    return code


@inner
def _copy_plain(text: Bytes, stop: int, memory: Int64) -> None:
    """Copy characters that stay as they are, up to one that does not or that a mark may change.

    A mark that has no form of its own changes nothing behind a character that begins no key.
    """
    state, plain = array_at(memory, STATE, np.int64), array_at(memory, _PLAIN, np.uint8)
    word, classes = array_at(memory, _WORD, np.uint8), array_at(memory, _CLASSES, np.uint8)
    at, used = state[_AT], state[_USED]
    end = min(stop, at + len(word) - _SLACK - used)
    point = kind = 0
    if at < end:
        point = code_point(text, at)
        kind = signed(classes[point])
    while at < end:
        if (not plain[point]) if point < 0x80 else (kind & _CHANGES or point == _UNDERLINE):
            break
        size, is_ascii = width(signed(text[at])), point < 0x80
        if at + size < stop:
            point = signed(text[at + size])
            if point >= 0x80:
                point = code_point(text, at + size)
                kind = signed(classes[point])
                if kind & JOINS and (is_ascii or kind & _CHANGES):
                    break
        for _ in range(size):
            word[used] = text[at]
            used += 1
            at += 1
    state[_AT], state[_USED] = at, used


@inner
def _encode_text(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """One text's ids from state[OUT] on; what became of it, as in arrays.py."""
    state, word, pool = (
        array_at(memory, STATE, np.int64),
        array_at(memory, _WORD, np.uint8),
        array_at(memory, _POOL, np.uint8),
    )
    leads, ascii_mapped = array_at(memory, _LEADS, np.uint8), array_at(memory, _ASCII, np.int32)
    added, rules = array_at(memory, _ADDED, np.int64), array_at(memory, _RULES, np.int64)
    state[_AT] = state[_ALONE] = span[0]
    state[_USED], state[_FRESH], state[_MARK], state[_SPACES], state[_TRIED] = 0, 1, 0, 0, 0
    while state[_AT] < span[1]:
        at = state[_AT]
        lead = signed(text[at])
        if leads[lead] and starts_key(added, text, at, span[1]):
            return REFER
        if state[_USED] + _SLACK > len(word):
            code = _settle(memory)
            if code != OK:
                return code
            if state[OUT] >= state[LIMIT]:
                return OK
        following = signed(text[at + 1]) if at + 1 < span[1] else 0
        mapped = signed(ascii_mapped[lead]) if lead < 0x80 and following < 0x80 else -1
        if mapped >= 0 and lead != _RETURN:
            _to_write(memory, mapped if mapped > 0 else -1, at + 1)
        else:
            code = _next_character(text, span, memory)
            if code != OK:
                return code
        for place in range(state[_BEGIN], state[_END]):
            byte = pool[place] if state[_POOLED] else text[place]
            if byte == _SPACE:
                state[_SPACES] += 1
                continue
            if state[_SPACES] | state[_FRESH] | state[_MARK]:
                code = _begin_byte(memory)
                if code != OK:
                    return code
                if state[OUT] >= state[LIMIT]:
                    return OK
            word[state[_USED]] = byte
            state[_USED] += 1
        if state[_SPACES] == 0 and state[_FRESH] == 0:
            _copy_plain(text, span[1], memory)
    if state[_SPACES] > 0 and not rules[STRIP] and not rules[SPLIT_SPACES]:
        code = _blanks(memory)
        if code != OK:
            return code
    return _end_word(memory)


@entry
def encode(text: Bytes, bounds: Int64, memory: Int64) -> int:
    """Ids of the texts text[bounds[t]:bounds[t + 1]] from cursor[0] on; see arrays.py for the answer.

    memory: addresses of Output's arrays, the state, and the arrays of Charsmap, Tables, Scratch and Words.
    """
    cursor, state = array_at(memory, CURSOR, np.int64), array_at(memory, STATE, np.int64)
    while cursor[0] < len(bounds) - 1:
        if not begin_text(memory):
            return ROOM
        code = _encode_text(text, (bounds[cursor[0]], bounds[cursor[0] + 1]), memory)
        if code != OK:
            cursor[1] = state[_MISSING]
            return code
        if not end_text(memory):
            return ROOM
    return OK
