"""What the gateway asks of a tokenizer, whatever library is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rose.batch import Int32


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the tokenizer's template puts around a text: ids before and after it, i32[p] and i32[s]."""

    prefix: Int32
    suffix: Int32

    def truncate(self, input_ids: Int32, max_tokens: int) -> Int32:
        """Cut the end of the text inside `input_ids` (template included) to max_tokens ids in all.

        The same ids as truncating first and applying the template afterwards.
        """
        if len(input_ids) <= max_tokens:
            return input_ids
        text_end = max(max_tokens - len(self.suffix), len(self.prefix))
        return np.concatenate([input_ids[:text_end], self.suffix])[:max_tokens]


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

    def encode(self, texts: Sequence[str]) -> list[Int32]:
        """Ids of each text, i32[n], special tokens included, neither cut nor padded."""
        ...
