"""Unigram from raw text to ids in one pass: normalise, split into words, and the best path through each word.

The best path is the reference's to the bit: scores are added in float64 from the word's start, of two paths
as good the one found first stays, and neighbouring unknown characters are one token.
Source: Kudo 2018, arXiv 1804.10959; the `tokenizers` library, models/unigram.
"""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import (
    BLOCK,
    CURSOR,
    IDS,
    OK,
    REFER,
    ROOM,
    STATE,
    UNKNOWN,
    WORD,
    Bytes,
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
from gateway.tokenization.kernels.paths import (
    ADDED,
    ALONE,
    ASCII,
    AT,
    BEGIN,
    CLASSES,
    COLLAPSE,
    END,
    FRESH,
    LEADS,
    MARK,
    MISSING,
    PLAIN,
    POOL,
    POOLED,
    PREFIXES,
    RULES,
    SLACK,
    SPACES,
    SPLIT,
    SPLIT_SPACES,
    STRIP,
    TRIED,
    UNITS,
    USED,
    WORD_BYTES,
    WORDS,
    best_path,
    settle,
)
from gateway.tokenization.kernels.texts import LIMIT, OUT, begin_text, end_text
from gateway.tokenization.kernels.trie import starts_key
from gateway.tokenization.kernels.utf8 import before, code_point, width
from gateway.tokenization.kernels.words import MAX_WORD, find, hash_of, recall, remember

_SPACE = 0x20
_UNDERLINE = 0x2581  # "▁", E2 96 81
# First byte of the lowest mark that joins, U+0300.
_MARK_LEAD = 0xCC
_ZERO_WIDTH_JOINER = 0x200D
_NEWLINE, _RETURN = 10, 13
# Of code points that may become something else; an UNKNOWN one has all of these.
_CHANGES = MAPPED | OPENS | BLANK


@inner
def _end_word(memory: Int64) -> int:
    """Write the ids of the word, if it has bytes, and begin another. Gives OK or ROOM."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, WORD_BYTES, np.uint8)
    stop, out = state[USED], state[OUT]
    if stop == 0:
        return OK
    if stop > MAX_WORD or state[TRIED] > 0:  # the end of a long one is no word of its own
        out = best_path(memory, stop, out)
    else:
        key = hash_of(word, 0, stop)
        slot = find(memory, WORDS, key, word, (0, stop))
        if slot >= 0:
            out = recall(memory, WORDS, slot, array_at(memory, IDS, np.int32), out)
        else:
            out = best_path(memory, stop, out)
            if out >= 0:
                remember(memory, WORDS, key, word, (0, stop), (state[OUT], out))
    if out < 0:
        return ROOM
    state[USED], state[TRIED], state[OUT] = 0, 0, out
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
    state, classes = array_at(memory, STATE, np.int64), array_at(memory, CLASSES, np.uint8)
    units = array_at(memory, UNITS, np.uint32)
    at, stop = state[AT], span[1]
    point = code_point(text, at)
    kind = signed(classes[point])
    if kind == UNKNOWN:
        state[MISSING] = point >> 8
        return BLOCK
    after = at + width(signed(text[at]))
    group, found = after, -1
    if at >= state[ALONE] and not (kind & CONTROL and point != _RETURN):
        while group < stop:
            joining = code_point(text, group)
            if classes[joining] == UNKNOWN:
                state[MISSING] = joining >> 8
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
            state[ALONE] = group
    if found < 0 and kind & MAPPED:
        found = shortest(units, text, at, after)
    if found < 0 and kind & BLANK:
        rules = array_at(memory, RULES, np.int64)
        if rules[STRIP]:
            return REFER
        if rules[SPLIT_SPACES]:
            state[SPACES] += 1
            state[BEGIN], state[END], state[AT] = 0, 0, after
            return OK
    _to_write(memory, found, after)
    state[MARK] = point == _UNDERLINE and found < 0
    return OK


@inner
def _to_write(memory: Int64, found: int, after: int) -> None:
    """The string of the pool at `found`, or, if that is negative, the text itself, up to `after`."""
    state, pool = array_at(memory, STATE, np.int64), array_at(memory, POOL, np.uint8)
    if found >= 0:
        end = found
        while pool[end] != 0:
            end += 1
        state[POOLED], state[BEGIN], state[END] = 1, found, end
    else:
        state[POOLED], state[BEGIN], state[END] = 0, state[AT], after
    state[AT] = after


@inner
def _mark(memory: Int64) -> None:
    """Write "▁"."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, WORD_BYTES, np.uint8)
    used = state[USED]
    word[used], word[used + 1], word[used + 2] = 0xE2, 0x96, 0x81
    state[USED] = used + 3


@inner
def _blanks(memory: Int64) -> int:
    """Write the spaces that wait, each a "▁" that begins a word; or end the word. Gives OK, ROOM or WORD."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    room = len(array_at(memory, WORD_BYTES, np.uint8)) - SLACK
    if rules[SPLIT_SPACES]:
        state[FRESH] = 1
        return _end_word(memory)
    count = 1 if rules[COLLAPSE] else state[SPACES]
    for _ in range(count):
        if rules[SPLIT]:
            code = _end_word(memory)
            if code != OK:
                return code
        if state[USED] > room:
            return WORD
        _mark(memory)
    state[FRESH] = 0
    return OK


@inner
def _begin_byte(memory: Int64) -> int:
    """What comes before a byte that is no space: spaces that wait, the prefix, the end of the word before."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    code = OK
    if state[SPACES] > 0:
        code = _blanks(memory)
        state[SPACES] = 0
    if state[FRESH]:
        state[FRESH] = 0
        if rules[PREFIXES] and not state[MARK]:
            _mark(memory)
    elif state[MARK] and rules[SPLIT] and code == OK:
        code = _end_word(memory)
    state[MARK] = 0
    return code


@inner
def _copy_plain(text: Bytes, stop: int, memory: Int64) -> None:
    """Copy characters that stay as they are, up to one that does not or that a mark may change.

    A mark that has no form of its own changes nothing behind a character that begins no key.
    """
    state, plain = array_at(memory, STATE, np.int64), array_at(memory, PLAIN, np.uint8)
    word, classes = array_at(memory, WORD_BYTES, np.uint8), array_at(memory, CLASSES, np.uint8)
    at, used = state[AT], state[USED]
    end = min(stop, at + len(word) - SLACK - used)
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
    state[AT], state[USED] = at, used


@inner
def _encode_text(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """One text's ids from state[OUT] on; what became of it, as in arrays.py."""
    state, word, pool = (
        array_at(memory, STATE, np.int64),
        array_at(memory, WORD_BYTES, np.uint8),
        array_at(memory, POOL, np.uint8),
    )
    leads, ascii_mapped = array_at(memory, LEADS, np.uint8), array_at(memory, ASCII, np.int32)
    added, rules = array_at(memory, ADDED, np.int64), array_at(memory, RULES, np.int64)
    state[AT] = state[ALONE] = span[0]
    state[USED], state[FRESH], state[MARK], state[SPACES], state[TRIED] = 0, 1, 0, 0, 0
    while state[AT] < span[1]:
        at = state[AT]
        lead = signed(text[at])
        if leads[lead] and starts_key(added, text, at, span[1]):
            return REFER
        if state[USED] + SLACK > len(word):
            code = settle(memory)
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
        for place in range(state[BEGIN], state[END]):
            byte = pool[place] if state[POOLED] else text[place]
            if byte == _SPACE:
                state[SPACES] += 1
                continue
            if state[SPACES] | state[FRESH] | state[MARK]:
                code = _begin_byte(memory)
                if code != OK:
                    return code
                if state[OUT] >= state[LIMIT]:
                    return OK
            word[state[USED]] = byte
            state[USED] += 1
        if state[SPACES] == 0 and state[FRESH] == 0:
            _copy_plain(text, span[1], memory)
    if state[SPACES] > 0 and not rules[STRIP] and not rules[SPLIT_SPACES]:
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
            cursor[1] = state[MISSING]
            return code
        if not end_text(memory):
            return ROOM
    return OK
