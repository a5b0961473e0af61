"""WordPiece from raw text to ids in one pass: normalise, split into words, and the longest pieces of each.

What BERT's normalizer and pre-tokenizer make of a character does not depend on its neighbours, so it is a
string by code point, in which a space parts words: of "É" it is "e", of "," it is " , ". The library is asked
for these strings, 256 at a time, when a text first has one of the characters.
Source: Wu et al. 2016, arXiv 1609.08144; the `tokenizers` library, normalizers/bert and models/wordpiece.
"""

from __future__ import annotations

import threading
import unicodedata
from typing import NamedTuple

import numpy as np
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from gateway.tokenization.kernels.arrays import (
    BLOCK,
    BLOCK_SIZE,
    IDS,
    NUM_BLOCKS,
    OK,
    OWN,
    REFER,
    ROOM,
    STATE,
    Bytes,
    Int64,
    UInt8,
    signed,
)
from gateway.tokenization.kernels.jit import array_at, inner
from gateway.tokenization.kernels.texts import LIMIT, MISSING, OUT, each_text, each_word
from gateway.tokenization.kernels.trie import child_of, id_of, starts_key
from gateway.tokenization.kernels.utf8 import code_point, width
from rose.batch import Int32

# Places in the rules. MAX_CHARS: a longer word is the UNKNOWN_ID.
UNKNOWN_ID, MAX_CHARS = range(2)
# Length of a string in the pool that says that the character is not for this kernel.
REFERRED = 255
_POOL_BYTES = 16  # for each code point; strings take 5 on average if all are asked for
_SPACE = 0x20


class Tables(NamedTuple):
    """places: i32[0x110000], by code point, where in the pool its string is; 0: not known yet.

    pool: u8[m], the length of a string, then the string. plain: u8[128], what an ASCII character becomes, if
    that is one byte inside a word; else 0. leads: u8[256] and added: trie, of tokens that are cut out of the
    text. pieces: trie. prefix: u8[p], of pieces that go on with a word. rules: i64[2].
    """

    places: Int32
    pool: UInt8
    plain: UInt8
    leads: UInt8
    added: Int64
    pieces: Int64
    prefix: UInt8
    rules: Int64


_PLACES, _POOL, _PLAIN, _LEADS, _ADDED, _PIECES, _PREFIX, _RULES, _WORD, _WORDS = range(OWN, OWN + 10)
# What the state holds after MISSING: bytes of the word, and how many characters it has.
_USED, _CHARS = MISSING + 1, MISSING + 2


class Classifier:
    """Fills in the strings of code points. reorders: the normalizer puts marks in order, and drops most."""

    def __init__(self, normalizer: Normalizer, pre_tokenizer: PreTokenizer, *, reorders: bool) -> None:
        self.places: Int32 = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.int32)
        self.pool: UInt8 = np.empty(NUM_BLOCKS * BLOCK_SIZE * _POOL_BYTES, np.uint8)
        self._normalizer, self._pre_tokenizer, self._reorders = normalizer, pre_tokenizer, reorders
        self._used = 1
        self._lock = threading.Lock()
        self.classify(0)

    def classify(self, block: int) -> None:
        """Fill in the 256 code points from 256 * block on. Safe to run twice."""
        start = block * BLOCK_SIZE
        with self._lock:
            if self.places[start]:
                return
            records = [self._record(point) for point in range(start, start + BLOCK_SIZE)]
            ends = self._used + np.cumsum([len(record) for record in records])
            self.pool[self._used : ends[-1]] = np.frombuffer(b"".join(records), np.uint8)
            # The first last: it says that the block is here.
            self.places[start + 1 : start + BLOCK_SIZE] = ends[:-1]
            self.places[start] = self._used
            self._used = int(ends[-1])

    def _record(self, point: int) -> bytes:
        char = chr(point)
        if 0xD800 <= point < 0xE000:
            return bytes([REFERRED])
        between = " ".join(
            word
            for word, _ in self._pre_tokenizer.pre_tokenize_str(self._normalizer.normalize_str(f"x{char}x"))
        )
        made = between[1:-1].encode()
        # Marks that stay, and characters that may be marks to the library, can change places.
        moves = made and (unicodedata.combining(char) or unicodedata.category(char) == "Cn")
        return bytes([REFERRED]) if moves and self._reorders else bytes([len(made)]) + made

    def plain(self, leads: UInt8) -> UInt8:
        """See Tables; nothing is plain that may begin an added token."""
        plain = np.zeros(128, np.uint8)
        for point in range(128):
            place = self.places[point]
            if self.pool[place] == 1 and self.pool[place + 1] != _SPACE and not leads[point]:
                plain[point] = self.pool[place + 1]
        return plain


@inner
def _pieces(stop: int, memory: Int64, out: int) -> int:
    """Ids of the word's bytes up to `stop` to ids[out:]; gives the end of them, or -1 if there is no room."""
    word, ids = array_at(memory, _WORD, np.uint8), array_at(memory, IDS, np.int32)
    trie, prefix = array_at(memory, _PIECES, np.int64), array_at(memory, _PREFIX, np.uint8)
    first, here = out, 0
    while here < stop:
        node = trie[0]
        if here > 0:
            for at in range(len(prefix)):
                node = child_of(trie, node, signed(prefix[at]) + 1)
        at, end, longest = here, here, -1
        while at < stop and node != 0:
            node = child_of(trie, node, signed(word[at]) + 1)
            at += 1
            if node != 0 and id_of(node) >= 0:
                longest, end = id_of(node), at
        if out >= len(ids):
            return -1
        if longest < 0:
            ids[first] = array_at(memory, _RULES, np.int64)[UNKNOWN_ID]
            return first + 1
        ids[out] = longest
        out += 1
        here = end
    return out


_each_word = each_word(_WORDS, _pieces)


@inner
def _end_word(memory: Int64) -> int:
    """Write the ids of the word, if there is one, and begin another. Gives OK or ROOM."""
    state, rules = array_at(memory, STATE, np.int64), array_at(memory, _RULES, np.int64)
    used, chars = state[_USED], state[_CHARS]
    state[_USED] = state[_CHARS] = 0
    if chars > rules[MAX_CHARS]:
        ids, out = array_at(memory, IDS, np.int32), state[OUT]
        if out >= len(ids):
            return ROOM
        ids[out] = rules[UNKNOWN_ID]
        state[OUT] = out + 1
    elif used > 0:
        return _each_word(memory, (memory[2 * _WORD], used), used)
    return OK


@inner
def _copy_plain(text: Bytes, at: int, stop: int, memory: Int64) -> int:
    """Copy what ASCII from `at` on is one byte inside a word; gives where that ends."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, _WORD, np.uint8)
    plain, used, start = array_at(memory, _PLAIN, np.uint8), state[_USED], at
    while at < stop:
        lead = signed(text[at])
        if lead >= 0x80 or plain[lead] == 0:
            break
        if used < len(word):  # else the word has too many characters as it is
            word[used] = plain[lead]
            used += 1
        at += 1
    state[_USED] = used
    state[_CHARS] += at - start
    return at


@inner
def _write(memory: Int64, place: int, length: int) -> int:
    """Write `length` bytes of the pool behind `place`; spaces end words. Gives OK or ROOM."""
    state, word = array_at(memory, STATE, np.int64), array_at(memory, _WORD, np.uint8)
    pool = array_at(memory, _POOL, np.uint8)
    for index in range(place + 1, place + 1 + length):
        byte = signed(pool[index])
        if byte == _SPACE:
            code = _end_word(memory)
            if code != OK or state[OUT] >= state[LIMIT]:
                return code
            continue
        if state[_USED] < len(word):
            word[state[_USED]] = byte
            state[_USED] += 1
        state[_CHARS] += byte & 0xC0 != 0x80
    return OK


@inner
def _encode_text(text: Bytes, span: tuple[int, int], memory: Int64) -> int:
    """One text's ids from state[OUT] on; what became of it, as in arrays.py."""
    state, places = array_at(memory, STATE, np.int64), array_at(memory, _PLACES, np.int32)
    pool, leads = array_at(memory, _POOL, np.uint8), array_at(memory, _LEADS, np.uint8)
    state[_USED] = state[_CHARS] = 0
    at, stop = span
    while True:
        at = _copy_plain(text, at, stop, memory)
        if at >= stop:
            return _end_word(memory)
        lead = signed(text[at])
        if leads[lead] and starts_key(array_at(memory, _ADDED, np.int64), text, at, stop):
            return REFER
        point = code_point(text, at)
        place = signed(places[point])
        if place == 0:
            state[MISSING] = point >> 8
            return BLOCK
        if pool[place] == REFERRED:
            return REFER
        code = _write(memory, place, signed(pool[place]))
        if code != OK or state[OUT] >= state[LIMIT]:
            return code
        at += width(lead)


# See Kernel.run. The arrays of its own: of Tables, the word's u8[w], and of Words.
encode = each_text(_encode_text)
