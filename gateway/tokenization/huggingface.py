"""The `tokenizers` library behind the Tokenizer interface."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from gateway.tokenization.base import PairTokens, SpecialTokens, TextTokens, Token
from gateway.tokenization.beside import honour_neighbours, wants_types
from rose.batch import Int32
from rose.errors import ModelLoadError

# The library's lists of a million offsets or tokens take 0.1 s each, and nothing else runs meanwhile.
_RUN_TOKENS = 4096


class HuggingFaceTokenizer:
    """A tokenizer.json. Its own truncation and padding are switched off: lengths have one rule, not its.

    typed: False: the model gets no token types, whatever the template has.
    """

    def __init__(self, backend: Backend, *, typed: bool = True) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._backend_name = "tokenizers"
        self._special_tokens = _special_tokens(backend)
        self._typed = typed
        pair = _pair_tokens(backend)
        self._pair_tokens = pair if typed else replace(pair, types=(0, 0, 0, 0, 0))
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def from_file(cls, path: Path) -> HuggingFaceTokenizer:
        """Read a tokenizer.json, and what the files beside it say about it.

        Raises:
            ModelLoadError: the file is missing or is not one that the library reads; see honour_neighbours.
        """
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for everything
            raise ModelLoadError(f"cannot read the tokenizer {path}: {error}") from error
        backend.no_truncation()  # else the probes of what it adds may be cut
        honour_neighbours(backend, path.parent)
        return cls(backend, typed=wants_types(path.parent))

    @property
    def vocab_size(self) -> int:
        """The highest id it can give, plus one."""
        return self._vocab_size

    @property
    def special_tokens(self) -> SpecialTokens:
        """What the file's template adds to each text."""
        return self._special_tokens

    @property
    def pair_tokens(self) -> PairTokens:
        """What the file's template adds to two texts."""
        return self._pair_tokens

    @property
    def backend(self) -> str:
        """What makes the ids, for /info."""
        return self._backend_name

    @property
    def speedup(self) -> int:
        """See Tokenizer."""
        return 1

    def because(self, reason: str) -> HuggingFaceTokenizer:
        """This tokenizer, which says why nothing faster stands in for it."""
        self._backend_name = f"tokenizers ({reason})"
        return self

    def describe(self) -> dict[str, Any]:
        """Its tokenizer.json as the library writes it, whatever older form was read."""
        described: dict[str, Any] = orjson.loads(self._backend.to_str())
        return described

    def literal(self) -> HuggingFaceTokenizer:
        """A copy to which special tokens that a text spells out are ordinary words."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return HuggingFaceTokenizer(backend, typed=self._typed)

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        """Ids of each text, i32[n], with the template. max_tokens: cut as SpecialTokens.truncate does.

        One call for the whole list: the library spreads it over its own threads. `encode_batch_fast` keeps no
        character offsets (25 % less time) and releases the GIL, which `encode` does not.
        """
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=True)
        rows = [np.array(encoding.ids, np.int32) for encoding in encodings]
        if max_tokens is None:
            return rows
        return [self._special_tokens.truncate(row, max_tokens) for row in rows]

    def encode_ends(self, texts: Sequence[str], max_tokens: int) -> list[Int32]:
        """See Tokenizer. All of them."""
        return self.encode(texts)

    def tokens(self, texts: Sequence[str], *, special_tokens: bool) -> Iterator[TextTokens]:
        """The tokens of each text, with the template's or without."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=special_tokens)
        for text, encoding in zip(texts, encodings, strict=True):
            yield TextTokens(len(encoding), _runs(text, encoding))

    def decode(self, sequences: Iterable[Int32], *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence of ids, i32[n], which are in [0, vocab_size)."""
        rows = [ids.tolist() for ids in sequences]
        return list(self._backend.decode_batch(rows, skip_special_tokens=skip_special_tokens))


def _runs(text: str, encoding: Encoding) -> Iterator[list[Token]]:
    encoding.truncate(_RUN_TOKENS)  # the rest is in `overflowing`, in pieces of that length
    yield _tokens(text, encoding)
    for piece in encoding.overflowing:
        yield _tokens(text, piece)


def _tokens(text: str, encoding: Encoding) -> list[Token]:
    return [
        Token(token_id, token, True, None, None)
        if special
        else Token(token_id, text[start:stop], False, start, stop)
        for token_id, token, special, (start, stop) in zip(
            encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
        )
    ]


def _special_tokens(backend: Backend) -> SpecialTokens:
    """Read the template off an encoded probe: what the mask marks before the text and after it."""
    probe = backend.encode("a", add_special_tokens=True)
    added = np.array(probe.special_tokens_mask, bool)
    ids = np.array(probe.ids, np.int32)
    text = np.flatnonzero(~added)
    if len(text) == 0:
        return SpecialTokens(ids, ids[:0])
    return SpecialTokens(ids[: text[0]], ids[text[-1] + 1 :])


def _pair_tokens(backend: Backend) -> PairTokens:
    """Read the template for pairs off an encoded probe, whose tokens say which text they are of."""
    probe = backend.encode("a", "b", add_special_tokens=True)
    ids, texts = np.array(probe.ids, np.int32), probe.sequence_ids
    if 0 not in texts or 1 not in texts:  # it knows no letters, so that no text comes through
        return PairTokens(ids, ids[:0], ids[:0], (0, 0, 0, 0, 0))
    first, second = texts.index(0), texts.index(1)
    between, end = first + texts.count(0), second + texts.count(1)
    types = [*probe.type_ids, 0]  # one more, for a suffix that is not there
    prefix, one, middle, two, suffix = (types[at] for at in (0, first, between, second, end))
    return PairTokens(ids[:first], ids[between:second], ids[end:], (prefix, one, middle, two, suffix))
