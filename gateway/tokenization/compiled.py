"""A compiled tokeniser behind the Tokenizer interface, and the library beside it for what it does not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import sub

import numpy as np

from gateway.tokenization.base import PairTokens, SpecialTokens, TextTokens
from gateway.tokenization.ends import end_of
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.tokenization.kernels.arrays import BLOCK, CODE_BITS, REFER, ROOM, WORD, Output
from gateway.tokenization.kernels.jit import addresses_of, called_directly
from gateway.tokenization.kernels.kernel import Kernel
from gateway.tokenization.kernels.words import new_words
from rose.batch import Int32, RaggedIds

_WORD_BYTES, _IDS, _TEXTS, _STATES = 1 << 12, 1 << 14, 1 << 6, 32
_GROWTH = 4
# A thread's memory that a giant text made larger than this is given back.
_KEPT = 1 << 18
_NO_LIMIT = 1 << 40
_CODE = (1 << CODE_BITS) - 1
_EMPTY = np.zeros(0, np.int32)
# Of text that is dense in tokens; a template has fewer tokens than are spared.
_BYTES_A_TOKEN, _SPARE = 4, 256
# Most English texts have fewer.
_CHARS_A_TOKEN = 6


class _Workspace:
    """What one thread needs to run a kernel: buffers, which grow only when texts ask for it."""

    def __init__(self, kernel: Kernel, template: SpecialTokens) -> None:
        self._kernel = kernel
        self.run = called_directly(kernel.run, b"", 0, 0, 0, 0)
        self._word_bytes = _WORD_BYTES
        self.is_modest = True  # whether it is worth keeping
        self._scratch = kernel.scratch(_WORD_BYTES)
        self._words = new_words()
        self._state = np.zeros(_STATES, np.int64)
        self._output = Output(
            np.empty(_IDS, np.int32),
            np.zeros(_TEXTS + 1, np.int64),
            np.zeros(_TEXTS + 1, np.int64),
            np.zeros(2, np.int64),
            template.prefix,
            template.suffix,
        )
        self._addresses()

    def encode(self, texts: Sequence[bytes], most: int) -> tuple[RaggedIds, list[int]]:
        """Ids of each text with the template, at most `most` of its own; and which texts are referred."""
        if len(texts) >= len(self._output.texts):
            self._make_room_for(len(texts))
        np.cumsum([len(text) for text in texts], out=self._output.texts[1 : len(texts) + 1])
        blob, first = b"".join(texts), 0
        referred: list[int] = []
        while code := self.run(blob, self.memory, len(texts), first, most) & _CODE:
            first = int(self._output.cursor[0])
            if code == REFER:
                referred.append(first)
                self._output.bounds[first + 1] = self._output.bounds[first]
                first += 1
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
        self._addresses()

    def _addresses(self) -> None:
        out = self._output
        self.ids = out.ids
        self.is_modest = max(self._word_bytes, len(out.ids), len(out.bounds)) <= _KEPT
        own = (*self._kernel.arrays, *self._scratch, *self._words)
        self._arrays = addresses_of([*self._output, self._state, *own])
        self.memory: int = self._arrays.ctypes.data

    def _make_room_for(self, num_texts: int) -> None:
        bounds, texts = np.zeros((2, 2 * num_texts), np.int64)
        self._output = self._output._replace(bounds=bounds, texts=texts)
        self._addresses()


class CompiledTokenizer:
    """Ids from a kernel, exactly those of `reference`, which does offsets, decoding and odd texts."""

    def __init__(self, reference: HuggingFaceTokenizer, kernel: Kernel) -> None:
        self._reference = reference
        self._kernel = kernel
        self._prepare = kernel.prepare
        self._template = reference.special_tokens
        self._around = len(self._template.prefix) + len(self._template.suffix)
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

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> Sequence[Int32]:
        """Ids of each text, i32[n], with the template. max_tokens: cut as SpecialTokens.truncate does."""
        most = _NO_LIMIT if max_tokens is None else max(max_tokens - self._around, 0)
        if len(texts) != 1 or len(texts[0]) > _IDS or most == 0:
            return self._encode_all(texts, max_tokens)
        # A call of a function takes as long as some tokens, so most single texts take no other of ours.
        try:
            prepared, workspace = self._prepare(texts[0]), self._workspaces.pop()
        except (UnicodeEncodeError, IndexError):  # a lone surrogate; all workspaces are in use
            return self._encode_all(texts, max_tokens)
        answer = REFER if prepared is None else workspace.run(prepared, workspace.memory, 1, 0, most)
        row = workspace.ids[: answer >> CODE_BITS].copy()
        self._workspaces.append(workspace)
        return self._encode_all(texts, max_tokens) if answer & _CODE else [row]

    def _encode_all(self, texts: Sequence[str], max_tokens: int | None) -> Sequence[Int32]:
        """As encode, whatever the texts are."""
        most = _NO_LIMIT if max_tokens is None else max(max_tokens - self._around, 0)
        prepared = [self._prepared(text) for text in texts]
        workspace = self._take()
        rows: Sequence[Int32]
        rows, referred = workspace.encode([text or b"" for text in prepared], most)
        if workspace.is_modest:
            self._workspaces.append(workspace)
        referred += [index for index, text in enumerate(prepared) if text is None]
        if referred:
            again = self._reference.encode([texts[index] for index in referred], max_tokens)
            instead = dict(zip(referred, again, strict=True))
            rows = [instead.get(index, row) for index, row in enumerate(rows)]
        if max_tokens is not None and max_tokens < self._around:
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

    def tokens(self, texts: Sequence[str], *, special_tokens: bool) -> Iterator[TextTokens]:
        """The tokens of each text, with the template's or without."""
        return self._reference.tokens(texts, special_tokens=special_tokens)

    def decode(self, sequences: Iterable[Int32], *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence of ids, i32[n], which are in [0, vocab_size)."""
        return self._reference.decode(sequences, skip_special_tokens=skip_special_tokens)

    def _prepared(self, text: str) -> bytes | None:
        """What the kernel reads of a text; None: the text is not for it."""
        try:
            return self._prepare(text)
        except UnicodeEncodeError:  # a lone surrogate
            return None

    def _take(self) -> _Workspace:
        """A workspace that no other thread uses; a list's pop is one step under the GIL."""
        try:
            return self._workspaces.pop()
        except IndexError:
            return _Workspace(self._kernel, self._template)


def _rows(ids: Int32, ends: list[int]) -> RaggedIds:
    """A copy of the rows ids[ends[n]:ends[n + 1]]."""
    return RaggedIds(ids[: ends[-1]].copy(), map(sub, ends[1:], ends))
