"""A WordPiece tokenizer.json as the tables of its kernel, or why it is not one for it.

Taken: BERT's normalizer, in any of its settings, and BERT's pre-tokenizer. These are the files of BERT,
MiniLM, MPNet, BGE, GTE and E5 in English.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import normalizers, pre_tokenizers

from gateway.tokenization.added import read_added
from gateway.tokenization.ends import BLANK_OR_STOP, parting
from gateway.tokenization.kernels import wordpiece
from gateway.tokenization.kernels.arrays import Array
from gateway.tokenization.kernels.trie import build_trie
from gateway.tokenization.unsupported import UnsupportedError

# Four bytes each fit into the smallest word buffer.
_MOST_CHARS = 1000


@dataclass(frozen=True, slots=True)
class WordPieceKernel:
    """See kernels/kernel.py. tokens: the file's added tokens."""

    tables: wordpiece.Tables
    classifier: wordpiece.Classifier
    tokens: list[dict[str, Any]]

    name = "WordPiece"
    run = staticmethod(wordpiece.encode)
    prepare = staticmethod(str.encode)

    @property
    def parting(self) -> re.Pattern[str] | None:
        """See Kernel."""
        return parting(self.tokens, BLANK_OR_STOP)

    def scratch(self, word_bytes: int) -> list[Array]:
        """See Kernel."""
        return [np.empty(word_bytes, np.uint8)]

    @property
    def arrays(self) -> list[Array]:
        """See Kernel."""
        return [*self.tables]

    def classify(self, block: int) -> None:
        """See Kernel."""
        self.classifier.classify(block)

    def literal(self) -> WordPieceKernel:
        """See Kernel."""
        added = read_added(self.tokens, literal=True, raw=True)
        plain = self.classifier.plain(added.leads)
        return replace(self, tables=self.tables._replace(plain=plain, leads=added.leads, added=added.trie))


def read_wordpiece(file: dict[str, Any]) -> WordPieceKernel:
    """The kernel of a parsed tokenizer.json whose model is WordPiece.

    Raises:
        UnsupportedError: only the library does all that it says.
    """
    model, added = file["model"], read_added(file["added_tokens"], literal=False, raw=True)
    classifier = _classifier(file["normalizer"], file["pre_tokenizer"])
    vocab: dict[str, int] = model["vocab"]
    if model["unk_token"] not in vocab:
        raise UnsupportedError("WordPiece without an unknown token")
    if model["max_input_chars_per_word"] > _MOST_CHARS:
        raise UnsupportedError("words of more than 1000 characters")
    tables = wordpiece.Tables(
        classifier.places,
        classifier.pool,
        classifier.plain(added.leads),
        added.leads,
        added.trie,
        build_trie({piece.encode(): index for piece, index in vocab.items()}),
        np.frombuffer(model["continuing_subword_prefix"].encode(), np.uint8).copy(),
        np.array([vocab[model["unk_token"]], model["max_input_chars_per_word"]], np.int64),
    )
    return WordPieceKernel(tables, classifier, file["added_tokens"])


def _classifier(
    normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None
) -> wordpiece.Classifier:
    if normalizer is None or normalizer["type"] != "BertNormalizer":
        raise UnsupportedError(f"normalizer {None if normalizer is None else normalizer['type']}")
    if pre_tokenizer != {"type": "BertPreTokenizer"}:
        raise UnsupportedError(f"pre_tokenizer {None if pre_tokenizer is None else pre_tokenizer['type']}")
    settings = {name: value for name, value in normalizer.items() if name != "type"}
    strips = settings["lowercase"] if settings["strip_accents"] is None else settings["strip_accents"]
    made = normalizers.BertNormalizer(**settings)
    return wordpiece.Classifier(made, pre_tokenizers.BertPreTokenizer(), reorders=strips)
