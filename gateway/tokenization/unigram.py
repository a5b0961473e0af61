"""A Unigram tokenizer.json as the tables of its kernel, or why it is not one for it.

Taken: a precompiled character map or none; runs of spaces replaced by one, spaces at the end stripped; words
split at spaces or not; "▁" in front of words; byte fallback. These are the files of XLM-R, BGE-M3,
multilingual E5, T5 and mBART. The library writes older forms of them as newer ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gateway.tokenization.added import read_added
from gateway.tokenization.ends import SPACE, parting
from gateway.tokenization.kernels import paths, unigram
from gateway.tokenization.kernels.arrays import Array, Bytes, Float64, Int64
from gateway.tokenization.kernels.charsmap import BLANKS, Charsmap, Classifier, read_charsmap
from gateway.tokenization.kernels.trie import build_trie
from gateway.tokenization.unsupported import UnsupportedError
from rose.batch import Int32

_MARK = "▁"
_UNK_PENALTY = 10.0
_MAX_MAPPED_BYTES = 70
_COLLAPSE = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": blank} for blank in (" ", _MARK)]
_PLACES = {
    "prefix": paths.PREFIXES,
    "collapse": paths.COLLAPSE,
    "strip": paths.STRIP,
    "split_spaces": paths.SPLIT_SPACES,
    "split": paths.SPLIT,
}


@dataclass(frozen=True, slots=True)
class UnigramKernel:
    """See kernels/kernel.py. tokens: the file's added tokens."""

    charsmap: Charsmap
    tables: paths.Tables
    classifier: Classifier
    tokens: list[dict[str, Any]]

    name = "unigram"

    @property
    def parting(self) -> re.Pattern[str] | None:
        """See Kernel."""
        split = self.tables.rules[paths.SPLIT] or self.tables.rules[paths.SPLIT_SPACES]
        return parting(self.tokens, SPACE) if split else None

    def prepare(self, text: str) -> bytes:
        """See Kernel."""
        return text.encode()

    def scratch(self, word_bytes: int) -> paths.Scratch:
        """See Kernel."""
        return paths.Scratch(
            np.empty(word_bytes, np.uint8),
            np.empty(word_bytes + 1, np.float64),
            np.empty(word_bytes + 1, np.int32),
            np.empty(word_bytes + 1, np.int32),
        )

    @property
    def arrays(self) -> list[Array]:
        """See Kernel."""
        return [*self.charsmap, *self.tables]

    def run(self, text: Bytes, bounds: Int64, memory: Int64) -> int:
        """See Kernel."""
        return unigram.encode(text, bounds, memory)

    def classify(self, block: int) -> None:
        """See Kernel."""
        self.classifier.classify(block)

    def literal(self) -> UnigramKernel:
        """See Kernel."""
        added = read_added(self.tokens, literal=True, raw=True)
        return replace(
            self,
            charsmap=self.charsmap.looking_for(added.leads),
            tables=self.tables._replace(added=added.trie),
        )


def read_unigram(file: dict[str, Any]) -> UnigramKernel:
    """The kernel of a parsed tokenizer.json whose model is Unigram.

    Raises:
        UnsupportedError: only the library does all that it says.
    """
    precompiled, flags = _normalizer(file["normalizer"])
    flags |= _pre_tokenizer(file["pre_tokenizer"])
    added = read_added(file["added_tokens"], literal=False, raw=True)
    try:
        charsmap, classifier = read_charsmap(precompiled, added.leads)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error
    _check_charsmap(charsmap)
    trie, scores, byte_ids = _pieces(file["model"])
    rules = np.zeros(8, np.int64)
    for name, place in _PLACES.items():
        rules[place] = flags.get(name, False)
    rules[paths.BYTE_FALLBACK] = bool(file["model"].get("byte_fallback"))
    rules[paths.UNKNOWN_ID] = file["model"]["unk_id"]
    rules[paths.LONGEST] = max(4, *(len(piece.encode()) for piece, _ in file["model"]["vocab"]))
    scores = np.append(scores, scores.min() - _UNK_PENALTY)
    tables = paths.Tables(trie, scores, byte_ids, added.trie, rules)
    return UnigramKernel(charsmap, tables, classifier, file["added_tokens"])


def _normalizer(normalizer: dict[str, Any] | None) -> tuple[str | None, dict[str, bool]]:
    """The character map, and what happens to spaces after it."""
    if normalizer is None:
        return None, {}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    precompiled, flags = None, {}
    if steps and steps[0]["type"] == "Precompiled":
        precompiled, steps = steps[0]["precompiled_charsmap"], steps[1:]
    if steps and steps[0] == {"type": "Strip", "strip_left": False, "strip_right": True}:
        flags["strip"], steps = True, steps[1:]
    if steps and steps[0] in _COLLAPSE:
        flags["collapse"], steps = True, steps[1:]
    if steps:
        raise UnsupportedError(f"normalizer {steps[0]['type']}")
    return precompiled or None, flags


def _pre_tokenizer(pre_tokenizer: dict[str, Any] | None) -> dict[str, bool]:
    if pre_tokenizer is None:
        raise UnsupportedError("no pre_tokenizer")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    split_spaces = steps[0]["type"] == "WhitespaceSplit"
    [metaspace, *more] = steps[1:] if split_spaces and len(steps) > 1 else steps
    if more or metaspace["type"] != "Metaspace" or metaspace["replacement"] != _MARK:
        raise UnsupportedError(f"pre_tokenizer {', '.join(step['type'] for step in steps)}")
    scheme, split = metaspace["prepend_scheme"], metaspace["split"]
    if split_spaces and scheme != "always":
        raise UnsupportedError(f"WhitespaceSplit with prepend_scheme {scheme}")
    return {"prefix": scheme != "never", "split": split, "split_spaces": split_spaces}


def _check_charsmap(charsmap: Charsmap) -> None:
    """Refuse maps whose strings the kernel has no room for, or whose blanks it would not see."""
    strings = charsmap.pool.tobytes().decode(errors="replace").split("\0")
    if any(len(text.encode()) + 2 * text.count(" ") > _MAX_MAPPED_BYTES or _MARK in text for text in strings):
        raise UnsupportedError("character map with long strings")
    if any(blank in text for blank in BLANKS for text in strings):
        raise UnsupportedError("character map to blanks other than spaces")


def _pieces(model: dict[str, Any]) -> tuple[Int64, Float64, Int32]:
    """The pieces' trie i64[m], their scores f64[n] by id, and the ids i32[256] of bytes."""
    if model.get("unk_id") is None:
        raise UnsupportedError("Unigram without an unknown token")
    vocab = model["vocab"]
    ids = {piece.encode(): index for index, (piece, _) in enumerate(vocab)}
    if len(ids) != len(vocab):
        raise UnsupportedError("pieces that occur twice")
    scores = np.array([score for _, score in vocab], np.float64)
    byte_ids = np.full(256, -1, np.int32)
    if model.get("byte_fallback"):
        byte_ids[:] = [ids.get(f"<0x{byte:02X}>".encode(), -1) for byte in range(256)]
        if (byte_ids < 0).any():
            raise UnsupportedError("byte fallback without all bytes")
    return build_trie(ids), scores, byte_ids
