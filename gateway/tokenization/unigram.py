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
from gateway.tokenization.kernels.arrays import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Array,
    Float64,
    Int64,
    UInt16,
    UInt32,
)
from gateway.tokenization.kernels.charsmap import BLANKS, Charsmap, Classifier, read_charsmap
from gateway.tokenization.kernels.trie import MAX_LABEL, build_labelled
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
    run = staticmethod(unigram.encode)
    prepare = staticmethod(str.encode)

    @property
    def parting(self) -> re.Pattern[str] | None:
        """See Kernel."""
        split = self.tables.rules[paths.SPLIT] or self.tables.rules[paths.SPLIT_SPACES]
        return parting(self.tokens, SPACE) if split else None

    def scratch(self, word_bytes: int) -> paths.Scratch:
        """See Kernel."""
        return paths.Scratch(
            np.empty(word_bytes, np.uint16),
            np.empty(word_bytes, np.uint32),
            np.empty(word_bytes + 1, np.float64),
            np.empty(word_bytes + 1, np.int64),
        )

    @property
    def arrays(self) -> list[Array]:
        """See Kernel."""
        return [*self.charsmap, *self.tables]

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
    _check_model(file["model"])
    pieces = [piece for piece, _ in file["model"]["vocab"]]
    scores = np.array([score for _, score in file["model"]["vocab"]], np.float64)
    points = _by_frequency(pieces, scores)
    labels = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.uint16)
    labels[points[1:]] = np.arange(1, len(points))
    try:
        charsmap, classifier = read_charsmap(precompiled, added.leads, labels)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error
    _check_charsmap(charsmap)
    rules = np.zeros(8, np.int64)
    for name, place in _PLACES.items():
        rules[place] = flags.get(name, False)
    rules[paths.BYTE_FALLBACK] = bool(file["model"].get("byte_fallback"))
    rules[paths.UNKNOWN_ID] = file["model"]["unk_id"]
    rules[paths.LONGEST] = max(map(len, pieces))
    unknown_first = np.append(scores.min() - _UNK_PENALTY, scores)
    byte_ids = _byte_ids(pieces) if rules[paths.BYTE_FALLBACK] else np.zeros(256, np.int32)
    tables = paths.Tables(_trie(pieces, labels), unknown_first, points, byte_ids, added.trie, rules)
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


def _check_model(model: dict[str, Any]) -> None:
    if model.get("unk_id") is None:
        raise UnsupportedError("Unigram without an unknown token")
    if len({piece for piece, _ in model["vocab"]}) != len(model["vocab"]):
        raise UnsupportedError("pieces that occur twice")


def _points(pieces: list[str]) -> UInt32:
    """The code points of all pieces, u32[n], one after the other."""
    return np.frombuffer("".join(pieces).encode("utf-32-le"), "<u4").astype(np.uint32)


def _by_frequency(pieces: list[str], scores: Float64) -> UInt32:
    """0, then the code points of the pieces, the likeliest first: u32[k]. Scores are logarithms."""
    weights = np.repeat(np.exp(np.minimum(scores, 0)), [len(piece) for piece in pieces])
    points, places = np.unique(_points(pieces), return_inverse=True)
    order = np.argsort(-np.bincount(places, weights), kind="stable")
    if len(points) >= MAX_LABEL:
        raise UnsupportedError(f"more than {MAX_LABEL} characters")
    return np.append(np.uint32(0), points[order])


def _trie(pieces: list[str], labels: UInt16) -> Int64:
    """The pieces' trie by the labels of their characters."""
    lengths = [len(piece) for piece in pieces]
    rows = np.split(labels[_points(pieces)], np.cumsum(lengths)[:-1])
    keys = [row.astype(">u2").tobytes() for row in rows]
    order = sorted((index for index in range(len(pieces)) if lengths[index]), key=keys.__getitem__)
    in_order = np.concatenate([rows[index] for index in order]).astype(np.int32)
    return build_labelled(in_order, [lengths[index] for index in order], order, int(labels.max()))


def _byte_ids(pieces: list[str]) -> Int32:
    """The ids of the pieces that stand for bytes, i32[256]."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    byte_ids = np.array([ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)], np.int32)
    if (byte_ids < 0).any():
        raise UnsupportedError("byte fallback without all bytes")
    return byte_ids
