"""Added tokens: strings that are cut out of a text before anything else happens to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway.tokenization.kernels.arrays import Int64, UInt8
from gateway.tokenization.kernels.trie import build_trie
from gateway.tokenization.unsupported import UnsupportedError


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """contents: the tokens. trie: of them, i64[n]. leads: u8[256], 1 for their first bytes."""

    contents: tuple[str, ...]
    trie: Int64
    leads: UInt8


def read_added(tokens: list[dict[str, Any]], *, literal: bool, raw: bool) -> AddedTokens:
    """The tokens of which a text with one goes to the library.

    literal: without the special ones. raw: all are looked for in the text as it came, before normalisation.

    Raises:
        UnsupportedError: one is looked for after normalisation, or is not ASCII.
    """
    for token in tokens:
        if raw and token["normalized"]:
            raise UnsupportedError(f"added token {token['content']!r} is looked for in normalised text")
        if not token["content"].isascii():
            raise UnsupportedError(f"added token {token['content']!r} is not ASCII")
    contents = tuple(
        token["content"] for token in tokens if token["content"] and not (literal and token["special"])
    )
    encoded = [content.encode() for content in contents]
    leads = np.zeros(256, np.uint8)
    leads[[content[0] for content in encoded]] = 1
    return AddedTokens(contents, build_trie({content: at for at, content in enumerate(encoded)}), leads)
