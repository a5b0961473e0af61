"""A compiled tokeniser behind the Tokenizer interface, and the library beside it for what it does not do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gateway.tokenization.base import PairTokens, SpecialTokens, Token
from gateway.tokenization.ends import end_of
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.tokenization.kernels.arrays import BLOCK, OK, REFER, ROOM, WORD, Int64, Output
from gateway.tokenization.kernels.jit import addresses_of
from gateway.tokenization.kernels.kernel import Kernel
from gateway.tokenization.kernels.words import new_words
from rose.batch import Int32

_WORD_BYTES, _IDS, _TEXTS, _STATES = 1 << 12, 1 << 14, 1 << 6, 32
_GROWTH = 4
# A thread's memory that a giant text made larger than this is given back.
_KEPT = 1 << 18
_NO_LIMIT = 1 << 40
# Of text that is dense in tokens; a template has fewer tokens than are spared.
_BYTES_A_TOKEN, _SPARE = 4, 256
# Most English texts have fewer.
_CHARS_A_TOKEN = 6


class _Workspace:
    """What one thread needs to run a kernel: buffers, which grow only when texts ask for it."""

    def __init__(self, kernel: Kernel, template: SpecialTokens) -> None:
        self._kernel = kernel
        self._word_bytes = _WORD_BYTES
        self.is_modest = True  # whether it is worth keeping
        self._scratch = kernel.scratch(_WORD_BYTES)
        self._words = new_words()
        self._state = np.zeros(_STATES, np.int64)
        bounds, cursor = np.zeros(_TEXTS + 1, np.int64), np.zeros(3, np.int64)
        self._output = Output(np.empty(_IDS, np.int32), bounds, cursor, template.prefix, template.suffix)
        self._text_bounds = np.zeros(_TEXTS + 1, np.int64)
        self._memory = self._addresses()

    def encode(self, texts: Sequence[bytes], most: int) -> tuple[list[Int32], list[int]]:
        """Rows of ids with the template, at most `most` of a text's own; and which texts are referred."""
        if len(texts) >= len(self._text_bounds):
            self._make_room_for(len(texts))
        bounds = self._text_bounds[: len(texts) + 1]
        if len(texts) == 1:
            bounds[1] = len(texts[0])
        else:
            np.cumsum([len(text) for text in texts], out=bounds[1:])
        blob = np.frombuffer(b"".join(texts) or b"\0", np.uint8)
        cursor, referred = self._output.cursor, []
        cursor[0], cursor[2] = 0, most
        while (code := self._kernel.run(blob, bounds, self._memory)) != OK:
            if code == REFER:
                index = int(cursor[0])
                referred.append(index)
                self._output.bounds[index + 1] = self._output.bounds[index]
                cursor[0] += 1
            else:
                self._provide(code, len(blob))
        return _rows(self._output.ids, self._output.bounds[: len(texts) + 1].tolist()), referred

    def _provide(self, code: int, text_bytes: int) -> None:
        """What a kernel asks for by `code`: enough, as it reads the text anew."""
        if code == BLOCK:
            self._kernel.classify(int(self._output.cursor[1]))
        elif code == ROOM:
            ids = max(_GROWTH * len(self._output.ids), text_bytes // _BYTES_A_TOKEN + _SPARE)
            larger = np.empty(ids, np.int32)
            larger[: len(self._output.ids)] = self._output.ids
            self._output = self._output._replace(ids=larger)
        elif code == WORD:
            self._word_bytes = max(_GROWTH * self._word_bytes, int(self._output.cursor[1]))
            self._scratch = self._kernel.scratch(self._word_bytes)
        self._memory = self._addresses()

    def _addresses(self) -> Int64:
        out = self._output
        self.is_modest = max(self._word_bytes, len(out.ids), len(out.bounds)) <= _KEPT
        own = (*self._kernel.arrays, *self._scratch, *self._words)
        return addresses_of([*self._output, self._state, *own])

    def _make_room_for(self, num_texts: int) -> None:
        self._text_bounds = np.zeros(2 * num_texts, np.int64)
        self._output = self._output._replace(bounds=np.zeros(2 * num_texts, np.int64))
        self._memory = self._addresses()


class CompiledTokenizer:
    """Ids from a kernel, exactly those of `reference`, which does offsets, decoding and odd texts."""

    def __init__(self, reference: HuggingFaceTokenizer, kernel: Kernel) -> None:
        self._reference = reference
        self._kernel = kernel
        self._template = reference.special_tokens
        self._workspaces: list[_Workspace] = [_Workspace(kernel, self._template)]

    @property
    def vocab_size(self) -> int:
        """The highest id it can give, plus one."""
        return self._reference.vocab_size

    @property
    def special_tokens(self) -> SpecialTokens:
        """What the file's template adds to each text."""
        return self._template

    @property
    def pair_tokens(self) -> PairTokens:
        """What the file's template adds to two texts."""
        return self._reference.pair_tokens

    @property
    def backend(self) -> str:
        """What makes the ids, for /info."""
        return self._kernel.name

    @property
    def speedup(self) -> int:
        """See Tokenizer."""
        return 8

    def literal(self) -> CompiledTokenizer:
        """A copy to which special tokens that a text spells out are ordinary words."""
        return CompiledTokenizer(self._reference.literal(), self._kernel.literal())

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        """Ids of each text, i32[n], with the template. max_tokens: cut as SpecialTokens.truncate does."""
        around = len(self._template.prefix) + len(self._template.suffix)
        most = _NO_LIMIT if max_tokens is None else max(max_tokens - around, 0)
        prepared, refused = self._prepare(texts)
        workspace = self._take()
        rows, referred = workspace.encode(prepared, most)
        if workspace.is_modest:
            self._workspaces.append(workspace)
        referred += refused
        if referred:
            again = self._reference.encode([texts[index] for index in referred], max_tokens)
            for index, row in zip(referred, again, strict=True):
                rows[index] = row
        if max_tokens is not None and max_tokens < around:
            rows = [self._template.truncate(row, max_tokens) for row in rows]
        return rows

    def encode_ends(self, texts: Sequence[str], max_tokens: int) -> list[Int32]:
        """See Tokenizer. Reads as much of a text's end as that takes, where it can be parted."""
        rows: dict[int, Int32] = {}
        least = _CHARS_A_TOKEN * max_tokens
        while len(rows) < len(texts):
            left = [index for index in range(len(texts)) if index not in rows]
            ends = [end_of(texts[index], least, self._kernel.parting) for index in left]
            rows |= {
                index: row
                for index, end, row in zip(left, ends, self.encode(ends), strict=True)
                if len(row) >= max_tokens or len(end) == len(texts[index])
            }
            least *= _GROWTH
        return [rows[index] for index in range(len(texts))]

    def tokens(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[Token]]:
        """The tokens of each text, with the template's or without."""
        return self._reference.tokens(texts, special_tokens=special_tokens)

    def decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence of ids, which are in [0, vocab_size)."""
        return self._reference.decode(sequences, skip_special_tokens=skip_special_tokens)

    def _prepare(self, texts: Sequence[str]) -> tuple[list[bytes], list[int]]:
        """What the kernel reads of each text, and which texts are not for it."""
        prepare = self._kernel.prepare
        prepared: list[bytes] = []
        refused: list[int] = []
        for index, text in enumerate(texts):
            try:
                encoded = prepare(text)
            except UnicodeEncodeError:  # a lone surrogate
                encoded = None
            if encoded is None:
                refused.append(index)
            prepared.append(encoded or b"")
        return prepared, refused

    def _take(self) -> _Workspace:
        """A workspace that no other thread uses; a list's pop is one step under the GIL."""
        try:
            return self._workspaces.pop()
        except IndexError:
            return _Workspace(self._kernel, self._template)


def _rows(ids: Int32, ends: list[int]) -> list[Int32]:
    """Copies of the rows ids[ends[n]:ends[n + 1]], in one block."""
    block = ids[: ends[-1]].copy()
    if len(ends) == 2:
        return [block]
    return [block[start:end] for start, end in pairwise(ends)]
