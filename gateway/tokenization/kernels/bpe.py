"""Byte-level BPE from raw text to ids in one pass: scan a word, look it up, or merge its bytes."""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import (
    BLOCK,
    IDS,
    OK,
    REFER,
    ROOM,
    STATE,
    UNKNOWN,
    WORD,
    Bytes,
    Int64,
    signed,
)
from gateway.tokenization.kernels.jit import array_at, inner
from gateway.tokenization.kernels.merges import (
    ADDED,
    CLASSES,
    LEADS,
    LONGEST,
    NORMALIZED,
    PATTERN,
    RULES,
    SYMBOLS,
    WORDS,
    merge_part,
    merge_word,
    settle,
)
from gateway.tokenization.kernels.scanner import BLANK, DISPUTED, run_of, word_end
from gateway.tokenization.kernels.texts import LIMIT, MISSING, OUT, each_text, each_word
from gateway.tokenization.kernels.trie import starts_key
from gateway.tokenization.kernels.utf8 import code_point, width

# Bytes that a longer word is settled in.
_PART = 1 << 13

_each_word = each_word(WORDS, merge_word)


@inner
def _check_word(text: Bytes, start: int, end: int, stop: int, memory: Int64) -> int:
    """OK; BLOCK: the word has a code point of unknown class; REFER: a disputed one, or an added token."""
    classes, leads = array_at(memory, CLASSES, np.uint8), array_at(memory, LEADS, np.uint8)
    added, rules = array_at(memory, ADDED, np.int64), array_at(memory, RULES, np.int64)
    at = start
    while at < end or (at < stop and at == end):  # the next one too: its class may have ended the word
        lead = signed(text[at])
        if lead >= 0x80:
            point = code_point(text, at)
            kind = signed(classes[point])
            if kind == UNKNOWN:
                array_at(memory, STATE, np.int64)[MISSING] = point >> 8
                return BLOCK
            if kind & DISPUTED and rules[NORMALIZED]:
                return REFER
        if at < end and leads[lead] and starts_key(added, text, at, stop):
            return REFER
        at += width(lead)
    return OK


@inner
def _add_word(text: Bytes, start: int, end: int, memory: Int64) -> int:
    """Write the word's ids, or as many as are wanted. Gives OK, ROOM or WORD."""
    state, longest = array_at(memory, STATE, np.int64), array_at(memory, RULES, np.int64)[LONGEST]
    room, at = len(array_at(memory, SYMBOLS, np.int32)), start
    while end - at > room:
        if state[OUT] + room > len(array_at(memory, IDS, np.int32)):
            return ROOM
        cut = settle(text, at, at + room, memory) if longest > 0 and room >= _PART else at
        if cut == at:
            state[MISSING] = end - at if longest == 0 or room >= _PART else _PART
            return WORD
        at = cut
        if state[OUT] >= state[LIMIT]:
            return OK
    if at == start:
        return _each_word(memory, (signed(text.ctypes.data) + start, end - start), (text, start, end))
    out = merge_part((text, at, end), memory, state[OUT])
    if out < 0:
        return ROOM
    state[OUT] = out
    return OK


@inner
def _encode_text(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """One text's ids from state[OUT] on; what became of it, as in arrays.py.

    It ends early only before a word, and where no added token follows that would take the blanks before it.
    """
    state, classes = array_at(memory, STATE, np.int64), array_at(memory, CLASSES, np.uint8)
    pattern = array_at(memory, RULES, np.int64)[PATTERN]
    at, stop = span
    while at < stop:
        if state[OUT] >= state[LIMIT]:
            last = run_of(text, at, stop, classes, BLANK, BLANK)
            return _check_word(text, at, min(last + 1, stop), stop, memory)
        end = word_end(text, at, stop, classes, pattern)
        code = _check_word(text, at, end, stop, memory)
        if code == OK:
            code = _add_word(text, at, end, memory)
        if code != OK:
            return code
        at = end
    return OK


# See Kernel.run. The arrays of its own: of Tables, Scratch and Words.
encode = each_text(_encode_text)
