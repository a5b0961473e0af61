"""SentencePiece's precompiled character map, as the `tokenizers` library applies it.

The library looks up each grapheme of less than six bytes as a whole, then its characters one by one, and
takes the shortest match, even if that drops the rest of the grapheme. So grapheme boundaries matter, next to
marks that join what stands before them. Which code points do is asked of the library itself, 256 at a time,
when a text first has one: whatever Unicode it was built with, the answer is its own.
Source: the `spm_precompiled` crate; Unicode Standard Annex 29.
"""

from __future__ import annotations

import base64
from functools import cache
from typing import NamedTuple

import numpy as np
from tokenizers.normalizers import Precompiled

from gateway.tokenization.kernels.arrays import (
    BLOCK_SIZE,
    UNKNOWN,
    Bytes,
    Int64,
    UInt8,
    UInt16,
    UInt32,
    signed,
)
from gateway.tokenization.kernels.jit import entry, inner
from gateway.tokenization.kernels.utf8 import code_point, width
from rose.batch import Int32

# Of a code point: it has a normal form; it begins a longer key; it joins what is before it, or what is after
# it; nothing joins it; a boundary beside it may depend on more than its neighbours; it is a blank without a
# normal form; it is "▁".
MAPPED, OPENS, JOINS, PREPENDS, CONTROL, RISKY, BLANK, IS_MARK = 1, 2, 4, 8, 16, 32, 64, 128
KIND, LABEL_AT, LABEL = 0xFF, 8, 0xFFFF
# Beside class and label: some key has it, but not in front.
CONTINUES = 1 << 24
MARK_POINT = 0x2581

# char::is_whitespace of the library's language, but for the space.
BLANKS = (
    "\t\n\v\f\r\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)

_ACUTE = "\u0301"
# Scripts with conjuncts, and Hangul.
_RISKY = ((0x0900, 0x1D00), (0xA800, 0xAC00), (0xA960, 0xA980), (0xAC00, 0xD800))


class Charsmap(NamedTuple):
    """units: u32[n], the map's double array. pool: u8[m], its strings, each closed by 0.

    characters: u32[0x110000], by code point: its class (KIND); the label that the vocabulary gives it, 0 if
    none (LABEL, from LABEL_AT on); CONTINUES. ascii_mapped: i32[128], where in the pool the string of an
    ASCII character is, 0 if it has none, -1 for BLANK. added_leads: u8[256], 1 for bytes that begin a token
    that is cut out of the text before normalisation. plain: i32[256], by byte, the label of ASCII that has
    one, is not mapped, no space and no such byte; else 0.
    """

    units: UInt32
    pool: UInt8
    characters: UInt32
    ascii_mapped: Int32
    added_leads: UInt8
    plain: Int32

    def looking_for(self, added_leads: UInt8) -> Charsmap:
        """The same map beside other added tokens."""
        plain = np.zeros(256, np.int32)
        stays = (self.ascii_mapped == 0) & (added_leads[:128] == 0)
        plain[:128] = stays * (self.characters[:128] >> LABEL_AT & LABEL)
        plain[[0x0D, 0x20]] = 0
        return self._replace(added_leads=added_leads, plain=plain)


@entry
def shortest(units: UInt32, text: Bytes, start: int, stop: int) -> int:
    """Where in the pool the string is of the shortest key that text[start:stop] begins with, or -1."""
    node = _offset(signed(units[0]))
    for at in range(start, stop):
        byte = signed(text[at])
        if byte == 0:
            return -1
        node ^= byte
        if node >= len(units):
            return -1
        unit = signed(units[node])
        if unit & 0x800000FF != byte:
            return -1
        node ^= _offset(unit)
        if unit & 0x100:
            return signed(units[node] & 0x7FFFFFFF) + 1
    return -1


@inner
def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


@inner
def _opens(units: UInt32, text: Bytes, start: int, stop: int) -> bool:
    """Whether a key longer than text[start:stop] begins with it."""
    node = _offset(signed(units[0]))
    for at in range(start, stop):
        node ^= signed(text[at])
        if node >= len(units):
            return False
        unit = signed(units[node])
        if unit & 0x800000FF != text[at]:
            return False
        node ^= _offset(unit)
    for byte in range(1, 256):
        child = node ^ byte
        if child < len(units) and signed(units[child]) & 0x800000FF == byte:
            return True
    return False


@entry
def _continuing(units: UInt32, characters: UInt32) -> None:
    """Mark with CONTINUES what the keys have behind their first characters."""
    key, nodes, tried = np.zeros(256, np.uint8), np.zeros(256, np.int64), np.zeros(256, np.int64)
    depth, nodes[0] = 0, _offset(signed(units[0]))
    while depth >= 0:
        tried[depth] += 1
        byte = tried[depth]
        child = nodes[depth] ^ byte
        if byte > 255 or depth > 250:
            depth -= 1
        elif child < len(units) and signed(units[child]) & 0x800000FF == byte:
            unit = signed(units[child])
            key[depth] = byte
            depth += 1
            nodes[depth], tried[depth] = child ^ _offset(unit), 0
            if unit & 0x100:
                at = width(signed(key[0]))
                while at < depth:
                    characters[code_point(key, at)] |= np.uint32(CONTINUES)
                    at += width(signed(key[at]))


@entry
def _own_classes(units: UInt32, text: Bytes, bounds: Int64, classes: UInt8) -> None:
    """MAPPED and OPENS of the characters text[bounds[n]:bounds[n + 1]]."""
    for index in range(len(bounds) - 1):
        start, stop = bounds[index], bounds[index + 1]
        classes[index] = 0
        if stop > start:
            if shortest(units, text, start, stop) >= 0:
                classes[index] |= MAPPED
            if _opens(units, text, start, stop):
                classes[index] |= OPENS


def _characters(block: int) -> list[str]:
    """The 256 characters from 256 * block on; "" for halves of surrogate pairs."""
    points = range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
    return ["" if 0xD800 <= point < 0xE000 else chr(point) for point in points]


@cache
def _boundaries(block: int) -> UInt8:
    """JOINS, PREPENDS and CONTROL of a block's characters, u8[256], by what the library makes of their likes.

    It swallows what joins a key or is joined by it. Of two marks that are keys it swallows the second, unless
    they join what is before them and are looked up one by one.
    """
    letters, marks = Precompiled(_probe_map(b"x")), Precompiled(_probe_map(_ACUTE.encode()))
    classes = np.zeros(BLOCK_SIZE, np.uint8)
    for index, text in enumerate(_characters(block)):
        if text and letters.normalize_str("x" + text) == "y":
            classes[index] |= JOINS
        if text and letters.normalize_str(f"{text}x{_ACUTE}") == f"{text}y{_ACUTE}":
            classes[index] |= PREPENDS
        if text and marks.normalize_str(text + 2 * _ACUTE) == text + "y":
            classes[index] |= CONTROL
    return classes


class Classifier:
    """Fills in the classes of a charsmap's code points."""

    def __init__(self, charsmap: Charsmap) -> None:
        self._charsmap = charsmap
        self.classify(0)

    def classify(self, block: int) -> None:
        """Fill in the 256 code points from 256 * block on. Safe to run twice."""
        points, texts = range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE), _characters(block)
        encoded = [text.encode() for text in texts]
        bounds = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=bounds[1:])
        classes = np.zeros(BLOCK_SIZE, np.uint8)
        _own_classes(
            self._charsmap.units, np.frombuffer(b"".join(encoded) + b"\0", np.uint8), bounds, classes
        )
        classes |= _boundaries(block)
        for place, text in enumerate(texts):
            if text and text in BLANKS and not classes[place] & MAPPED:
                classes[place] |= BLANK
        for low, high in _RISKY:
            classes[max(low - points[0], 0) : max(high - points[0], 0)] |= RISKY
        classes[[point == MARK_POINT for point in points]] |= IS_MARK
        known = self._charsmap.characters[points[0] : points[0] + BLOCK_SIZE]
        known[:] = known & ~np.uint32(KIND) | classes


def read_charsmap(precompiled: str | None, added_leads: UInt8, labels: UInt16) -> tuple[Charsmap, Classifier]:
    """A map as tokenizer.json has it, in base64; None: characters stay as they are.

    labels: u16[0x110000], by code point.

    Raises:
        ValueError: it is not such a map.
    """
    blob = b"" if precompiled is None else base64.b64decode(precompiled, validate=True)
    size = int.from_bytes(blob[:4], "little")
    if blob and (size % 4 or 4 + size > len(blob)):
        raise ValueError("the character map is cut off")
    units = np.frombuffer(blob[4 : 4 + size], "<u4").astype(np.uint32) if size else np.zeros(1, np.uint32)
    pool = np.frombuffer(b"\0" + blob[4 + size :] + b"\0", np.uint8).copy()
    characters: UInt32 = labels.astype(np.uint32) << np.uint32(LABEL_AT) | np.uint32(UNKNOWN)
    _continuing(units, characters)
    ascii_mapped = np.zeros(128, np.int32)
    for point in range(1, 128):
        at = shortest(units, np.frombuffer(bytes([point]), np.uint8), 0, 1)
        ascii_mapped[point] = -1 if at < 0 and chr(point) in BLANKS else max(at, 0)
    nothing = np.zeros(256, np.int32)
    charsmap = Charsmap(units, pool, characters, ascii_mapped, added_leads, nothing).looking_for(added_leads)
    return charsmap, Classifier(charsmap)


def _probe_map(key: bytes) -> bytes:
    """A map with one entry, of one byte or two, to "y"."""
    units, leaf, node = np.zeros(1024, "<u4"), 1, 0
    for depth, byte in enumerate(key):
        here, ends = node ^ byte, depth == len(key) - 1
        node = leaf if ends else 256 * (depth + 1)
        units[here] = (here ^ node) << 10 | ends << 8 | byte
    units[leaf] = 1 << 31
    return int(units.nbytes).to_bytes(4, "little") + units.tobytes() + b"y\0"
