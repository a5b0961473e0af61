"""Unigram from raw text to ids in one pass: normalise, split into words, and the best path through each word.

The best path is the reference's to the bit: scores are added in float64 from the word's start, of two paths
as good the one found first stays, and neighbouring unknown characters are one token.
Source: Kudo 2018, arXiv 1804.10959; the `tokenizers` library, models/unigram.
"""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import (
    BLOCK,
    OK,
    REFER,
    STATE,
    UNKNOWN,
    WORD,
    Bytes,
    Int64,
    UInt16,
    UInt32,
    signed,
    unsigned,
)
from gateway.tokenization.kernels.charsmap import (
    BLANK,
    CONTINUES,
    CONTROL,
    IS_MARK,
    JOINS,
    KIND,
    LABEL,
    LABEL_AT,
    MAPPED,
    MARK_POINT,
    OPENS,
    PREPENDS,
    RISKY,
    shortest,
)
from gateway.tokenization.kernels.jit import array_at, inner
from gateway.tokenization.kernels.paths import (
    ADDED,
    ALONE,
    ASCII,
    AT,
    CHARACTERS,
    COLLAPSE,
    FRESH,
    HAS_ODD,
    LABELS,
    LEADS,
    MARK,
    ODD,
    PLAIN,
    POOL,
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
    WORDS,
    best_path,
    settle,
)
from gateway.tokenization.kernels.texts import LIMIT, MISSING, OUT, each_text, each_word
from gateway.tokenization.kernels.trie import starts_key
from gateway.tokenization.kernels.utf8 import before, code_point, width
from gateway.tokenization.kernels.words import MAX_WORD

_SPACE = 0x20
_ZERO_WIDTH_JOINER = 0x200D
_NEWLINE, _RETURN = 10, 13
# Of code points that are never simply copied; one of an UNKNOWN class has all of these.
_STOPS = MAPPED | BLANK | IS_MARK


_each_word = each_word(WORDS, best_path)


@inner
def _end_word(memory: Int64) -> int:
    """Write the ids of the word, if it has characters, and begin another. Gives OK or ROOM."""
    state = array_at(memory, STATE, np.int64)
    used = state[USED]
    if used == 0:
        return OK
    # The end of a long word is no word of its own, and bytes of a character without a label are not kept.
    whole = state[TRIED] == 0 and state[HAS_ODD] == 0
    length = 2 * used if whole else MAX_WORD + 1
    code = _each_word(memory, (memory[2 * LABELS], length), used)
    state[USED] = state[TRIED] = state[HAS_ODD] = 0
    return code


@inner
def _depends(text: Bytes, span: tuple[int, int], start: int, stop: int, characters: UInt32) -> bool:
    """Whether the grapheme text[start:stop] may be part of a longer one."""
    if start > span[0]:
        previous = code_point(text, before(text, start))
        if previous == _ZERO_WIDTH_JOINER or characters[previous] & PREPENDS:
            return True
    return stop < span[1] and code_point(text, before(text, stop)) == _ZERO_WIDTH_JOINER


@inner
def _next_character(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """Write the character at state[AT], or the grapheme if it has a normal form as one.

    Moves state[AT] behind it. Gives OK, ROOM, BLOCK, WORD or REFER.
    """
    state, characters = array_at(memory, STATE, np.int64), array_at(memory, CHARACTERS, np.uint32)
    units, at = array_at(memory, UNITS, np.uint32), state[AT]
    point = code_point(text, at)
    kind = signed(characters[point]) & KIND
    if kind == UNKNOWN:
        state[MISSING] = point >> 8
        return BLOCK
    after, found = at + width(signed(text[at])), -1
    group = after
    if at >= state[ALONE] and not (kind & CONTROL and point != _RETURN):
        group = _grapheme_end(text, span[1], after, point, memory)
        if group < 0:
            return BLOCK
    if group > after:
        if group - at < 6 and kind & (MAPPED | OPENS):
            found = shortest(units, text, at, group)
        if found < 0:
            state[ALONE] = group
        elif kind & RISKY or _depends(text, span, at, group, characters):
            return REFER
        else:
            after = group
    if found < 0 and kind & MAPPED:
        found = shortest(units, text, at, after)
    state[AT] = after
    return _write_mapped(memory, found) if found >= 0 else _write_as_it_is(memory, point, kind)


@inner
def _grapheme_end(text: Bytes, stop: int, after: int, point: int, memory: Int64) -> int:
    """The end of what joins `point`, which ends at `after`; -1: that needs a block that is not known."""
    state, characters = array_at(memory, STATE, np.int64), array_at(memory, CHARACTERS, np.uint32)
    group = after
    while group < stop:
        joining = code_point(text, group)
        kind = signed(characters[joining]) & KIND
        if kind == UNKNOWN:
            state[MISSING] = joining >> 8
            return -1
        if point == _RETURN:
            if joining != _NEWLINE or group > after:
                break
        elif not kind & JOINS:
            break
        group += width(signed(text[group]))
    return group


@inner
def _write_as_it_is(memory: Int64, point: int, kind: int) -> int:
    """Write a character without a form. Gives OK, ROOM, WORD or REFER."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    if kind & BLANK:
        if rules[STRIP]:
            return REFER
        if rules[SPLIT_SPACES]:
            state[SPACES] += 1
            return OK
    state[MARK] = point == MARK_POINT
    return _write(memory, point)


@inner
def _write_mapped(memory: Int64, found: int) -> int:
    """Write the string of the pool at `found`. Gives OK, ROOM or WORD."""
    state, pool = array_at(memory, STATE, np.int64), array_at(memory, POOL, np.uint8)
    state[MARK] = 0
    while pool[found] != 0:
        code = _write(memory, code_point(pool, found))
        if code != OK:
            return code
        found += width(signed(pool[found]))
    return OK


@inner
def _write(memory: Int64, point: int) -> int:
    """Write a code point: a space waits, any other ends what waits before it. Gives OK, ROOM or WORD."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, LABELS, np.uint16)
    if point == _SPACE:
        state[SPACES] += 1
        return OK
    code = OK
    if state[SPACES] | state[FRESH] | state[MARK]:
        code = _begin_character(memory)
    used = state[USED]
    _put(memory, word, used, (point, signed(array_at(memory, CHARACTERS, np.uint32)[point])))
    state[USED] = used + 1
    return code


@inner
def _put(memory: Int64, word: UInt16, used: int, read: tuple[int, int]) -> None:
    """Write a code point, and what Charsmap.characters holds of it, as the word's character number `used`."""
    point, character = read
    label = character >> LABEL_AT & LABEL
    word[unsigned(used)] = label
    if label == 0:
        array_at(memory, ODD, np.uint32)[unsigned(used)] = point
        array_at(memory, STATE, np.int64)[HAS_ODD] = 1


@inner
def _mark(memory: Int64) -> None:
    """Write "▁"."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, LABELS, np.uint16)
    used = state[USED]
    _put(memory, word, used, (MARK_POINT, signed(array_at(memory, CHARACTERS, np.uint32)[MARK_POINT])))
    state[USED] = used + 1


@inner
def _blanks(memory: Int64) -> int:
    """Write the spaces that wait, each a "▁" that begins a word; or end the word. Gives OK, ROOM or WORD."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    room = len(array_at(memory, LABELS, np.uint16)) - SLACK
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
def _begin_character(memory: Int64) -> int:
    """What comes before a character that is no space: spaces that wait, the prefix, the end of a word."""
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
def _matters(character: int, opens: int) -> int:
    """Whether a mark may change a form: it has one itself, or with what is before it, if that opens a key."""
    return character & JOINS and ((opens and character & CONTINUES) or character & (_STOPS | OPENS))


@inner
def _character_at(text: Bytes, at: int, memory: Int64) -> int:
    """What Charsmap.characters holds of the one at `at`."""
    return signed(array_at(memory, CHARACTERS, np.uint32)[code_point(text, at)])


@inner
def _stays(text: Bytes, at: int, stop: int, memory: Int64) -> bool:
    """Whether the character at `at` is copied, so that a space before it is no last one."""
    if at >= stop:
        return False
    if text[at] < 0x80:
        if array_at(memory, PLAIN, np.int32)[text[at]] == 0:
            return False
    elif _character_at(text, at, memory) & (_STOPS | JOINS):
        return False
    after = at + width(signed(text[at]))
    return after >= stop or text[after] < 0x80 or not _matters(_character_at(text, after, memory), 1)


@inner
def _space(memory: Int64, used: int) -> int:
    """Write a single space behind the word's `used` characters: it begins a word, if words are split."""
    state = array_at(memory, STATE, np.int64)
    state[USED] = used
    code = _end_word(memory) if array_at(memory, RULES, np.int64)[SPLIT] else OK
    if code == OK:
        _mark(memory)
    return code


@inner
def _copy_plain(text: Bytes, stop: int, memory: Int64) -> int:
    """Copy characters that stay as they are, and single spaces. Gives OK or ROOM.

    Up to what does not stay, or may be changed by a mark behind it.
    """
    state, plain = array_at(memory, STATE, np.int64), array_at(memory, PLAIN, np.int32)
    word, characters = array_at(memory, LABELS, np.uint16), array_at(memory, CHARACTERS, np.uint32)
    splits = array_at(memory, RULES, np.int64)[SPLIT_SPACES]
    first, used = state[AT], state[USED]
    at, room, opens = first, len(word) - SLACK, 0
    while at < stop and used < room:
        lead = signed(text[unsigned(at)])
        label = signed(plain[unsigned(lead)])
        if label > 0:
            word[unsigned(used)] = label
            used, at, opens = used + 1, at + 1, OPENS
        elif lead < 0x80:
            if lead != _SPACE or splits or not _stays(text, at + 1, stop, memory):
                break
            code = _space(memory, used)
            if code != OK or state[OUT] >= state[LIMIT]:
                return code
            used, at = state[USED], at + 1
        else:
            point = code_point(text, at)
            character = signed(characters[unsigned(point)])
            if character & (_STOPS | JOINS) and (
                character & _STOPS or (at > first and _matters(character, opens))
            ):
                break
            label = character >> LABEL_AT & LABEL
            word[unsigned(used)] = label
            if label == 0:
                array_at(memory, ODD, np.uint32)[unsigned(used)] = point
                state[HAS_ODD] = 1
            used, at, opens = used + 1, at + width(lead), character & OPENS
    if first < at < stop and _matters(_character_at(text, at, memory), opens):
        at, used = before(text, at), used - 1
    state[AT], state[USED] = at, used
    return OK


@inner
def _step(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """Read the text on from state[AT], by one character at least. Gives what _next_character gives."""
    state, leads = array_at(memory, STATE, np.int64), array_at(memory, LEADS, np.uint8)
    added, ascii_mapped = array_at(memory, ADDED, np.int64), array_at(memory, ASCII, np.int32)
    at, stop = state[AT], span[1]
    lead = signed(text[at])
    following = signed(text[at + 1]) if at + 1 < stop else 0
    mapped = signed(ascii_mapped[lead]) if lead < 0x80 and following < 0x80 else -1
    if leads[lead] and starts_key(added, text, at, stop):
        return REFER
    if state[USED] > len(array_at(memory, LABELS, np.uint16)) - SLACK:
        code = settle(memory)
    elif mapped >= 0 and lead != _RETURN:
        state[AT], state[MARK] = at + 1, 0
        code = _write_mapped(memory, mapped) if mapped > 0 else _write(memory, lead)
    else:
        code = _next_character(text, span, memory)
    if code == OK and state[SPACES] == 0 and state[FRESH] == 0:
        code = _copy_plain(text, stop, memory)
    return code


@inner
def _encode_text(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """One text's ids from state[OUT] on; what became of it, as in arrays.py."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)
    state[AT] = state[ALONE] = span[0]
    state[USED] = state[HAS_ODD] = state[MARK] = state[SPACES] = state[TRIED] = 0
    state[FRESH] = 1
    code = OK
    while code == OK and state[AT] < span[1] and state[OUT] < state[LIMIT]:
        code = _step(text, span, memory)
    if code == OK and state[OUT] < state[LIMIT]:
        if state[SPACES] > 0 and not rules[STRIP] and not rules[SPLIT_SPACES]:
            code = _blanks(memory)
        if code == OK:
            code = _end_word(memory)
    if code == WORD:
        state[MISSING] = span[1] - span[0] + 2 * SLACK
    return code


# See Kernel.run. The arrays of its own: of Charsmap, Tables, Scratch and Words.
encode = each_text(_encode_text)
