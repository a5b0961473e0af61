"""Texts of a given length in tokens, cut from a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.plan import LoadgenError, Shape, Source

SUFFIXES = (".txt", ".md", ".csv", ".jsonl")
MAX_CORPUS_CHARS = 20_000_000
# English has about 1.3 tokens a word in the vocabularies of the field.
WORDS_PER_TOKEN = 0.75
# A word is rarely longer in tokens than this, so that this many words hold any number of tokens.
ATTEMPTS = 50


def words(corpus: Path) -> list[str]:
    """All words of a text file, or of the text files in a folder.

    Raises:
        LoadgenError: there is nothing to read.
    """
    if corpus.is_dir():
        files = sorted(path for path in corpus.rglob("*") if path.suffix in SUFFIXES)
    else:
        files = [corpus]
    found: list[str] = []
    budget = MAX_CORPUS_CHARS
    try:
        for path in files:
            text = path.read_text("utf-8", errors="replace")[:budget]
            found += text.split()
            budget -= len(text)
            if budget <= 0:
                break
    except OSError as error:
        raise LoadgenError(f"--corpus: {error}") from error
    if not found:
        raise LoadgenError(f"--corpus {corpus}: no words in it")
    return found


class Cutter:
    """Cuts texts out of a corpus. Without a tokenizer their lengths are those of English, roughly."""

    def __init__(self, source: Source) -> None:
        if source.corpus is None:
            raise LoadgenError("text needs --corpus")
        self._words = words(source.corpus)
        self._tokenizer = _load(source.tokenizer) if source.tokenizer is not None else None

    def texts(self, shape: Shape, rng: np.random.Generator) -> tuple[tuple[str, ...], int | None]:
        """The texts of one request, and its tokens when they are known."""
        lengths = rng.integers(shape.low, shape.high, shape.batch, endpoint=True).tolist()
        cut = self._roughly if self._tokenizer is None else self._exactly
        total = None if self._tokenizer is None else sum(lengths)
        return tuple(cut(length, rng) for length in lengths), total

    def _roughly(self, length: int, rng: np.random.Generator) -> str:
        return " ".join(self._stretch(max(1, int(length * WORDS_PER_TOKEN)), rng))

    def _exactly(self, length: int, rng: np.random.Generator) -> str:
        for _ in range(ATTEMPTS):
            text = self._fit(" ".join(self._stretch(length, rng)), length)
            if text is not None:
                return text
        raise LoadgenError(f"no text of the corpus has exactly {length} tokens")

    def _fit(self, text: str, length: int) -> str | None:
        """The start of `text` that has `length` tokens, or None."""
        for _ in range(4):
            encoding = self._encode(text)
            ordinary = [
                end
                for (_, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
                if not special
            ]
            excess = len(encoding.ids) - length
            if excess == 0:
                return text
            if excess < 0 or excess >= len(ordinary):
                return None
            text = text[: ordinary[len(ordinary) - excess - 1]]
        return None

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text)  # type: ignore[union-attr]

    def _stretch(self, count: int, rng: np.random.Generator) -> Iterator[str]:
        start = int(rng.integers(len(self._words)))
        return (self._words[(start + n) % len(self._words)] for n in range(count))


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise LoadgenError("--tokenizer needs the package tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    except Exception as error:  # the library raises nothing more special
        raise LoadgenError(f"--tokenizer {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
