"""What the gateway asks of a tokenizer, whatever library is behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rose.batch import Int32


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the tokenizer's template puts around a text: ids before and after it, i32[p] and i32[s]."""

    prefix: Int32
    suffix: Int32

    def truncate(self, input_ids: Int32, max_tokens: int, *, keep_end: bool = False) -> Int32:
        """Cut the end of the text inside `input_ids` (template included) to max_tokens ids in all.

        The same ids as truncating first and applying the template afterwards. keep_end: cut its beginning.
        """
        if len(input_ids) <= max_tokens:
            return input_ids
        if keep_end:
            room = max(max_tokens - len(self.prefix), len(self.suffix))
            return np.concatenate([self.prefix, input_ids[len(input_ids) - room :]])[:max_tokens]
        text_end = max(max_tokens - len(self.suffix), len(self.prefix))
        return np.concatenate([input_ids[:text_end], self.suffix])[:max_tokens]

    def strip(self, input_ids: Int32) -> Int32:
        """The text's own ids, i32[n - p - s], without the template."""
        return input_ids[len(self.prefix) : len(input_ids) - len(self.suffix)]


@dataclass(frozen=True, slots=True)
class PairTokens:
    """What the tokenizer's template puts before, between and after two texts: ids i32[p], i32[m], i32[s].

    types: the token types of the five parts, prefix, first text, separator, second text and suffix.
    """

    prefix: Int32
    separator: Int32
    suffix: Int32
    types: tuple[int, int, int, int, int]

    @property
    def count(self) -> int:
        """Tokens that the template adds to a pair."""
        return len(self.prefix) + len(self.separator) + len(self.suffix)

    def join(self, first: Int32, second: Int32) -> tuple[Int32, Int32]:
        """Ids and token types of the pair of two texts' own ids, i32[n] each."""
        parts = (self.prefix, first, self.separator, second, self.suffix)
        types = np.repeat(np.array(self.types, np.int32), [len(part) for part in parts])
        return np.concatenate(parts), types


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text. start, stop: its characters' places in the text; None for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of one text: how many, and all of them in runs, which are made as they are asked for."""

    count: int
    runs: Iterator[list[Token]]


class Tokenizer(Protocol):
    """Text to ids. Safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """The highest id it can give, plus one."""
        ...

    @property
    def special_tokens(self) -> SpecialTokens:
        """What `encode` adds to each text."""
        ...

    @property
    def pair_tokens(self) -> PairTokens:
        """What joins two texts that are read as one."""
        ...

    @property
    def backend(self) -> str:
        """What makes the ids, for /info."""
        ...

    @property
    def speedup(self) -> int:
        """About how many times as fast it is as the tokenizers library."""
        ...

    def literal(self) -> Tokenizer:
        """The same tokenizer, to which special tokens that a text spells out are ordinary words."""
        ...

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> Sequence[Int32]:
        """Ids of each text, i32[n], special tokens included, not padded.

        max_tokens: cut as SpecialTokens.truncate cuts the end, reading no more of a text than that takes.
        """
        ...

    def encode_ends(self, texts: Sequence[str], max_tokens: int) -> Sequence[Int32]:
        """As `encode`; of a text of more than max_tokens ids perhaps only the last, at least so many."""
        ...

    def tokens(self, texts: Sequence[str], *, special_tokens: bool) -> Iterator[TextTokens]:
        """The tokens of each text, with the template's or without."""
        ...

    def decode(self, sequences: Iterable[Int32], *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence of ids, i32[n], which are in [0, vocab_size)."""
        ...
