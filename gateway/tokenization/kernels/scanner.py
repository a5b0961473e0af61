"""The regular expressions that split text for byte-level BPE, written out as scanners.

Which code points are letters, numbers and blanks is asked of the library's own engine, 256 at a time, when a
text first has one; and so is whether it and this Python agree on a code point's place in normal forms.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
from tokenizers import Regex
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import PreTokenizer, Split

from gateway.tokenization.kernels.arrays import BLOCK_SIZE, NUM_BLOCKS, UNKNOWN, Bytes, UInt8, signed
from gateway.tokenization.kernels.jit import inner
from gateway.tokenization.kernels.utf8 import code_point, width

# Of a code point: what it is, and whether its normal forms are not the same in both Unicodes.
LETTER, NUMBER, BLANK, DISPUTED = 1, 2, 4, 8

# A pattern as the library writes it, and its number here. Of those that take contractions in any case, the
# number says how many digits are a word.
GPT2 = 0
_NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
PATTERNS = {
    r"\p{N}".join(_NEWER): 1,
    r"\p{N}{1,3}".join(_NEWER): 3,
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": GPT2,
}

_NFC = NFC()
_SPLITS = [
    (kind, Split(Regex(pattern), "removed"))
    for kind, pattern in ((LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (BLANK, r"\s"))
]
_FIRST_MARK, _LAST_MARK = "\u0334", "\u0345"

_LINE_FEED, _RETURN, _SPACE, _APOSTROPHE, _LONG_S = 10, 13, 32, 39, 0x17F


class Classifier:
    """Fills in the classes of code points."""

    def __init__(self) -> None:
        self.classes: UInt8 = np.full(NUM_BLOCKS * BLOCK_SIZE, UNKNOWN, np.uint8)
        self.classify(0)

    def classify(self, block: int) -> None:
        """Fill in the 256 code points from 256 * block on. Safe to run twice."""
        start = block * BLOCK_SIZE
        self.classes[start : start + BLOCK_SIZE] = _classes(block)


@cache
def _classes(block: int) -> UInt8:
    """The classes of 256 code points, u8[256]; no file has a say in them."""
    start = block * BLOCK_SIZE
    points = [point for point in range(start, start + BLOCK_SIZE) if not 0xD800 <= point < 0xE000]
    classes = np.zeros(BLOCK_SIZE, np.uint8)
    text = "".join(map(chr, points))
    if text:
        for kind, split in _SPLITS:
            classes[_removed(split, text)] |= kind
        classes[[_disputed(char) for char in text] + [False] * (BLOCK_SIZE - len(text))] |= DISPUTED
    for char in text:
        whole = unicodedata.normalize("NFD", char)
        if _differs(whole):
            parts = [ord(part) - start for part in whole]
            classes[[part for part in parts if 0 <= part < BLOCK_SIZE]] |= DISPUTED
    return classes


def _removed(split: PreTokenizer, text: str) -> list[int]:
    kept: set[int] = set()
    for _, (start, stop) in split.pre_tokenize_str(text):
        kept.update(range(start, stop))
    return [place for place in range(len(text)) if place not in kept]


def _differs(text: str) -> bool:
    return _NFC.normalize_str(text) != unicodedata.normalize("NFC", text)


def _disputed(char: str) -> bool:
    """Whether this Python does not know a character, or the library composes or orders it otherwise."""
    if unicodedata.category(char) == "Cn" or _differs(f"a{_LAST_MARK}{char}{_FIRST_MARK}"):
        return True
    return unicodedata.combining(char) > 0 and any(_differs("a" + mark + char) for mark in _MARKS.values())


# One undisputed mark of each class that orders marks: the first up to U+30FF.
_MARKS = {
    unicodedata.combining(mark): mark
    for mark in map(chr, range(0x30FF, 0x2FF, -1))
    if unicodedata.combining(mark) and not _differs(f"a{_LAST_MARK}{mark}{_FIRST_MARK}")
}


@inner
def kind_at(text: Bytes, at: int, stop: int, classes: UInt8) -> int:
    """The class of the code point at `at`: UNKNOWN if it is not known, -1 at the end."""
    if at >= stop:
        return -1
    return signed(classes[code_point(text, at)])


@inner
def run_of(text: Bytes, at: int, stop: int, classes: UInt8, mask: int, wanted: int) -> int:
    """The end of the run from `at` on of code points whose class within `mask` is `wanted`.

    A code point of unknown class ends it: whoever classifies the block starts again.
    """
    while at < stop:
        kind = signed(classes[code_point(text, at)])
        if kind == UNKNOWN or kind & mask != wanted:
            break
        at += width(signed(text[at]))
    return at


@inner
def word_end(text: Bytes, at: int, stop: int, classes: UInt8, pattern: int) -> int:
    """The end of the pattern's match at `at` < `stop`."""
    lead = signed(text[at])
    after = at + width(lead)
    kind, following = kind_at(text, at, stop, classes), kind_at(text, after, stop, classes)
    if lead == _APOSTROPHE:
        end = _contraction(text, at, stop, pattern != GPT2)
        if end > at:
            return end
    kinds = LETTER | NUMBER | BLANK
    if kind & LETTER:
        return run_of(text, after, stop, classes, LETTER, LETTER)
    starts = (
        lead == _SPACE if pattern == GPT2 else not kind & NUMBER and lead != _LINE_FEED and lead != _RETURN
    )
    if starts and following > 0 and following & LETTER:
        return run_of(text, after, stop, classes, LETTER, LETTER)
    if kind & NUMBER or (pattern == GPT2 and lead == _SPACE and following > 0 and following & NUMBER):
        if pattern == GPT2:
            return run_of(text, after, stop, classes, NUMBER, NUMBER)
        return _digits(text, after, stop, classes, pattern - 1)
    if not kind & kinds or (lead == _SPACE and following >= 0 and not following & kinds):
        end = run_of(text, after, stop, classes, kinds, 0)
        while pattern != GPT2 and end < stop and (text[end] == _LINE_FEED or text[end] == _RETURN):
            end += 1
        return end
    return _blanks(text, at, stop, classes, pattern)


@inner
def _digits(text: Bytes, at: int, stop: int, classes: UInt8, most: int) -> int:
    while most > 0 and at < stop:
        kind = kind_at(text, at, stop, classes)
        if kind == UNKNOWN or not kind & NUMBER:
            break
        at += width(signed(text[at]))
        most -= 1
    return at


@inner
def _blanks(text: Bytes, at: int, stop: int, classes: UInt8, pattern: int) -> int:
    """Blanks up to the last line's end among them; else all at a text's end, all but one before others."""
    end, last, lines = at, at, at
    while end < stop:
        kind = kind_at(text, end, stop, classes)
        if kind == UNKNOWN:
            return end
        if not kind & BLANK:
            break
        last = end
        end += width(signed(text[end]))
        if text[last] == _LINE_FEED or text[last] == _RETURN:
            lines = end
    if pattern != GPT2 and lines > at:
        return lines
    return end if end == stop or last == at else last


@inner
def _contraction(text: Bytes, at: int, stop: int, any_case: bool) -> int:
    """The end of 's, 't, 're, 've, 'm, 'll or 'd at `at`; `at` if there is none. Without case, ſ is an s."""
    if at + 1 >= stop:
        return at
    first = signed(text[at + 1])
    second = signed(text[at + 2]) if at + 2 < stop else 0
    if any_case:
        if first >= 0x80:
            return at + 3 if code_point(text, at + 1) == _LONG_S else at
        if 65 <= first <= 90:
            first += 32
        if 65 <= second <= 90:
            second += 32
    if first == 115 or first == 116 or first == 109 or first == 100:  # s t m d
        return at + 2
    if ((first == 114 or first == 118) and second == 101) or (first == 108 and second == 108):  # re ve ll
        return at + 3
    return at
