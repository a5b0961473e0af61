"""A byte-level BPE tokenizer.json as the tables of its kernel, or why it is not one for it.

Taken: text as it is or in NFC; one of the patterns of scanner.PATTERNS, in a Split of its own or ByteLevel's;
every byte a token. These are the files of Qwen2, Qwen3, Llama 3, GPT-2, RoBERTa and ModernBERT.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from operator import and_
from typing import Any

import numpy as np

from gateway.tokenization.added import read_added
from gateway.tokenization.ends import BLANK_OR_STOP, parting
from gateway.tokenization.kernels import bpe, merges, scanner
from gateway.tokenization.kernels.arrays import Array, UInt64
from gateway.tokenization.kernels.trie import build_trie
from gateway.tokenization.unsupported import UnsupportedError
from rose.batch import Int32

# Two marks at this distance are taken for a run. Letters have a few each; twice as many cost nothing to sort.
_MARKS_APART = 32
# Those that are no marks themselves, but decompose into marks alone.
_OF_MARKS = frozenset("\u0f73\u0f75\u0f81")
# Bytes of the longest token of a vocabulary whose words are settled in parts: that tries as many ends.
_LONGEST = 512


@dataclass(frozen=True, slots=True)
class BpeKernel:
    """See kernels/kernel.py. tokens: the file's added tokens; contents: those that are looked for."""

    tables: merges.Tables
    classifier: scanner.Classifier
    tokens: list[dict[str, Any]]
    contents: tuple[str, ...]

    name = "byte-level BPE"
    run = staticmethod(bpe.encode)

    @property
    def parting(self) -> re.Pattern[str] | None:
        """See Kernel."""
        return parting(self.tokens, BLANK_OR_STOP)

    def prepare(self, text: str) -> bytes | None:
        """See Kernel. Added tokens are looked for in the text as it was, so normalising must not hide one.

        Python sorts a run of combining marks in time with its square, 5 s for 80 000, and stops all else
        meanwhile; the library does not.
        """
        if not self.tables.rules[merges.NORMALIZED] or text.isascii():
            return text.encode()
        if _may_have_many_marks(text):
            return None
        normal = unicodedata.normalize("NFC", text)
        if normal != text and any(content in text for content in self.contents):
            return None
        return normal.encode()

    def scratch(self, word_bytes: int) -> merges.Scratch:
        """See Kernel."""
        ids, ranks, following, previous = (np.empty(word_bytes, np.int32) for _ in range(4))
        return merges.Scratch(ids, ranks, following, previous, np.empty(3 * word_bytes, np.int64))

    @property
    def arrays(self) -> list[Array]:
        """See Kernel."""
        return [*self.tables]

    def classify(self, block: int) -> None:
        """See Kernel."""
        self.classifier.classify(block)

    def literal(self) -> BpeKernel:
        """See Kernel."""
        added = read_added(self.tokens, literal=True, raw=False)
        tables = self.tables._replace(leads=added.leads, added=added.trie)
        return replace(self, tables=tables, contents=added.contents)


def read_bpe(file: dict[str, Any]) -> BpeKernel:
    """The kernel of a parsed tokenizer.json whose model is BPE.

    Raises:
        UnsupportedError: only the library does all that it says.
    """
    rules = np.zeros(4, np.int64)
    rules[merges.NORMALIZED] = _normalizes(file["normalizer"])
    rules[merges.PATTERN] = _pattern(file["pre_tokenizer"])
    rules[merges.WHOLE] = bool(file["model"].get("ignore_merges"))
    added = read_added(file["added_tokens"], literal=False, raw=False)
    tokens = _tokens(file["model"])
    byte_ids = np.array([tokens.get(bytes([byte]), -1) for byte in range(256)], np.int32)
    if (byte_ids < 0).any():
        raise UnsupportedError("bytes that are no tokens")
    pairs, ranks, merged, grows = _merges(file["model"])
    longest = max(map(len, tokens))
    rules[merges.LONGEST] = longest if grows and longest <= _LONGEST else 0
    whole = build_trie(tokens if rules[merges.WHOLE] else {})
    classifier = scanner.Classifier()
    tables = merges.Tables(
        classifier.classes, added.leads, added.trie, byte_ids, pairs, ranks, merged, whole, rules
    )
    return BpeKernel(tables, classifier, file["added_tokens"], added.contents)


def _normalizes(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        return False
    if normalizer != {"type": "NFC"}:
        raise UnsupportedError(f"normalizer {normalizer['type']}")
    return True


def _pattern(pre_tokenizer: dict[str, Any] | None) -> int:
    """The pattern's number in scanner.PATTERNS."""
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    names = ", ".join(step["type"] for step in steps)
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        raise UnsupportedError(f"pre_tokenizer {names or None}")
    if len(steps) == 1 and steps[0]["use_regex"]:
        return scanner.GPT2
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[1]["use_regex"]:
        raise UnsupportedError(f"pre_tokenizer {names}")
    if steps[0]["behavior"] != "Isolated" or steps[0]["invert"]:
        raise UnsupportedError("a Split that is not Isolated")
    pattern = scanner.PATTERNS.get(steps[0]["pattern"].get("Regex"))
    if pattern is None:
        raise UnsupportedError(f"pattern {steps[0]['pattern']}")
    return pattern


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in the file: itself if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _tokens(model: dict[str, Any]) -> dict[bytes, int]:
    """The ids of the tokens' bytes; tokens that are not made of bytes' letters never come out of a text."""
    if model.get("dropout") or model.get("byte_fallback"):
        raise UnsupportedError("BPE with dropout or byte fallback")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise UnsupportedError("BPE with a subword prefix or suffix")
    letters = _byte_letters()
    return {
        bytes(letters[letter] for letter in token): index
        for token, index in model["vocab"].items()
        if all(letter in letters for letter in token)
    }


def _merges(model: dict[str, Any]) -> tuple[UInt64, Int32, Int32, bool]:
    """The hash table of pairs, their ranks, what each rank's merge gives, and whether ranks grow.

    They grow if each merge comes after all that give one of its parts.
    """
    vocab = model["vocab"]
    rows = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    left = np.array([vocab[first] for first, _ in rows], np.int32)
    right = np.array([vocab[second] for _, second in rows], np.int32)
    merged = np.array([vocab[first + second] for first, second in rows], np.int32)
    size = 1 << (2 * len(rows) + 16).bit_length()
    pairs, ranks = np.zeros(size, np.uint64), np.zeros(size, np.int32)
    merges.fill(pairs, ranks, left, right)
    by_rank = np.arange(len(rows))
    last = np.full(max(vocab.values(), default=0) + 1, -1)
    last[merged] = by_rank  # of those that give the same the last one stays
    grows = bool((np.maximum(last[left], last[right]) < by_rank).all())
    return pairs, ranks, np.append(merged, np.int32(0)), grows


def _may_have_many_marks(text: str) -> bool:
    """Whether a run of 63 combining marks or more is in `text`; may be true of others, seldom."""
    looked_at = text[::_MARKS_APART]
    if looked_at.isascii():
        return False
    marks = [unicodedata.combining(char) > 0 or char in _OF_MARKS for char in looked_at]
    return any(map(and_, marks, marks[1:]))
