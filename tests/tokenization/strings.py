"""Texts that tokenisers disagree on, if they do: many scripts, and strings made of what is hard."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from pathlib import Path

_HARD = (
    # Blanks, controls, joiners, marks of several widths, prepended signs, scripts with conjuncts, Hangul.
    *" \t\n\r\v\f\x00\x01\x1c\x7f\x85\xa0\xad",
    *"\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202e\u2060\u3000\ufeff\ufffd\ufffe\ue000",
    *"\u0301\u0300\u0308\u0323\u0327\u0345\u0488\u05b0\u064e\u0651\u093c\u094d\u0e33\u0f71\u302e\u3099\u20dd\ufe0f",
    *"\U0001d165\U0001e8d0\U000e0061\U0001f3fb\U00016ff0",
    *"\u0600\u06dd\u070f\u0890\u08e2\u0d4e\U000110bd\U00011f02",
    *"\u0915\u0937\u0958\u095c\u09dc\u0b5c\u0f43\u1100\u1161\u11a8\u3131\uac00\uac01\ud7a3\uffa1",
    *"ªº²ß\u017f\u0130\u0131ǅŉﬁﬆ½\u2126\u212a\u2160\uff21\uff76\uff9e\ufdfa\u33a7\u2474\u1e9b\u0344",
    *"\u2581\u00ab\u2019'’`\"-_.,;:!?#@/\\|<>[](){}…—、。，！？「」",
    *"ABZabzéàøØñçąłžđÅÄÖĀΣςσΐабвЯёїאבגدهپขไทยကမြန်អក្សរ漢字仮名あいアイ中文한국어",
    *"0123456789٠١०१৩Ⅷ①",
    *"©®™ℹ⌚☃✈😀👍🏽🇩🇪🇫🫠",
    "\r\n", "  ", "   ", " \n", "\n\n",
    "'s", "'S", "'ſ", "'ll", "'re", "don't", "we've", "I'M", " the", " of",
    "👩\u200d👩\u200d👧", "e\u0301", "e\u0301\u0302", "\u0600e\u0301", "a\u0323\u0302", "क्ष", "क्\u0958\u0301",
    "\uff21\u0301", "ª\u0301", "©\u200d™", "x\u200d\u00aa\u0301", "\u1100\u1161\u11a8", "\u00aa\u0f71",
    "\x85\u0344\u0902", "\ufff9\u0344\u0301", "\u0600\u0344\u0902",
    "100,000.00",
)  # fmt: skip
_SPECIAL = (
    "<s>",
    "</s>",
    "<unk>",
    "<mask>",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "[MASK]",
    "<|endoftext|>",
    "<|im_start|>",
)


def corpora(folder: Path) -> list[str]:
    """Lines in 55 languages, sentences in four, and abstracts, from the folder of data sets."""
    texts = [line for path in sorted((folder / "udhr").glob("*.txt")) for line in _lines(path)]
    for path in sorted(folder.glob("stsb-*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            texts += [text for row in csv.reader(file) for text in row[:2]]
    abstracts = (folder / "cranfield" / "cran.all.1400.xml").read_text(encoding="utf-8")
    return texts + abstracts.split("</doc>")


def every_block() -> Iterator[str]:
    """The 256 code points of each block, in a row and each beside a letter."""
    for block in range(0x1100):
        points = [chr(block * 256 + low) for low in range(256) if not 0xD800 <= block * 256 + low < 0xE000]
        yield "".join(points)
        yield "x".join(points)
        yield " a".join(points)


def strange(count: int, seed: int, vocabulary: list[str]) -> Iterator[str]:
    """`count` strings of what is hard, code points of any 60 blocks, and the tokenizer's own words."""
    draw = random.Random(seed)
    blocks = draw.sample(range(0x31, 0x1100), 60)
    for number in range(count):
        if number % 500 == 0:
            yield draw.choice(_HARD) * draw.choice((50, 97, 300, 5000))
            continue
        yield "".join(_part(draw, vocabulary, blocks) for _ in range(draw.choice((1, 2, 3, 5, 8, 13, 30))))


def run_together(count: int, seed: int, vocabulary: list[str]) -> Iterator[str]:
    """`count` texts of some 10 000 characters with next to no blanks; some repeat themselves."""
    draw = random.Random(seed)
    for number in range(count):
        few = draw.choices(vocabulary, k=4) if number % 3 == 2 else vocabulary
        words = [draw.choice(_HARD if draw.random() < 0.003 else few) for _ in range(3000)]
        yield "".join(words).replace(" ", "")


def of_few_letters(vocabulary: list[str], length: int) -> Iterator[str]:
    """Words of so many characters in which a token may begin anywhere."""
    draw = random.Random(length)
    for letters in ("ab", "abcdefghijklmnopqrstuvwxyz", "-", "=-", ".,;:-=+*/", "人生而自由的是不了世界"):
        yield "".join(draw.choices(letters, k=length))
    for start in ("", "x"):  # so that a buffer ends between a letter and its mark
        yield start + "e\u0301" * (length // 2)
    words = [word for word in vocabulary if word.isalpha() and word.isascii()] or ["a"]
    yield "".join(draw.choices(words, k=length))[:length]


def _part(draw: random.Random, vocabulary: list[str], blocks: list[int]) -> str:
    kind = draw.random()
    if kind < 0.45:
        return draw.choice(_HARD)
    if kind < 0.6:
        return _any_point(draw, draw.randrange(0x31))
    if kind < 0.67:
        return _any_point(draw, draw.choice(blocks))
    if kind < 0.68:
        return draw.choice(_SPECIAL)
    if kind < 0.70:
        return draw.choice(_HARD) * draw.randrange(2, 12)
    return draw.choice(vocabulary)


def _any_point(draw: random.Random, block: int) -> str:
    point = 256 * block + draw.randrange(256)
    return chr(point) if not 0xD800 <= point < 0xE000 else " "


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
