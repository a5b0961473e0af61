"""Where tokenisation runs: short texts on the loop, long ones in threads beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from gateway.tokenization.base import PairTokens, SpecialTokens, TextTokens, Tokenizer
from rose.batch import Int32, RaggedIds

# Characters of one call, 5 ms of a compiled tokeniser. The calls of a job spread over the threads; a job that
# is cancelled ends with the calls that run.
_PART_CHARS = 250_000


class TokenizerPool:
    """A tokenizer and the threads that may use it.

    The threads share one tokenizer: tables are read only, and each call takes buffers of its own.

    threads: at most so many texts are tokenised beside the loop at once; the rest wait their turn.
    inline_chars: a job of up to this many characters, times the tokenizer's `speedup`, runs on the loop.
        A hop to a thread and back takes 30 us, 256 characters of English 60 to 90 us with the library, 2048
        take 40 compiled.
    """

    def __init__(self, tokenizer: Tokenizer, threads: int, inline_chars: int) -> None:
        self._tokenizer = tokenizer
        self._inline_chars = inline_chars
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    @property
    def vocab_size(self) -> int:
        """The highest id the tokenizer can give, plus one."""
        return self._tokenizer.vocab_size

    @property
    def special_tokens(self) -> SpecialTokens:
        """What the tokenizer adds to each text."""
        return self._tokenizer.special_tokens

    @property
    def pair_tokens(self) -> PairTokens:
        """What the tokenizer adds to two texts."""
        return self._tokenizer.pair_tokens

    async def encode(
        self, texts: Sequence[str], max_tokens: int | None = None, *, ends: bool = False
    ) -> RaggedIds:
        """Ids of each text, i32[n], special tokens included, not padded.

        max_tokens: as Tokenizer.encode; or, if `ends`, as Tokenizer.encode_ends.
        """
        work = partial(self._tokenizer.encode, max_tokens=max_tokens)
        if ends and max_tokens is not None:
            work = partial(self._tokenizer.encode_ends, max_tokens=max_tokens)
        if sum(map(len, texts)) <= self._inline_chars * self._tokenizer.speedup:
            return RaggedIds.of(work(texts))
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(self._threads, work, part) for part in _parts(texts)]
        return RaggedIds.join([RaggedIds.of(rows) for rows in await asyncio.gather(*calls)])

    async def encode_bare(
        self, texts: Sequence[str], most: int | None = None, *, ends: bool = False
    ) -> list[Int32]:
        """The texts' own ids, i32[n], without the template.

        most: of each text, its first ones; or, if `ends`, at least so many of its last.
        """
        template = self.special_tokens
        around = len(template.prefix) + len(template.suffix)
        rows = await self.encode(texts, None if most is None else most + around, ends=ends)
        return [template.strip(row) for row in rows]

    async def tokens(
        self,
        texts: Sequence[str],
        *,
        special_tokens: bool,
        check_count: Callable[[int], None],
        write: Callable[[Iterable[TextTokens]], Iterator[bytes]],
    ) -> bytes:
        """The tokens of each text, with the template's or without, as `write` writes them.

        check_count: told how many there are in all before they are made, and may raise: a token takes
        hundreds of bytes, its id alone four. write: gives parts that are not empty, and runs in threads.
        """
        # Not what a class makes of it that inherits: for who called, this is one piece of work.
        count = len((await TokenizerPool.encode(self, texts)).flat)
        if not special_tokens:
            count -= len(texts) * (len(self.special_tokens.prefix) + len(self.special_tokens.suffix))
        check_count(count)
        work = partial(self._tokenizer.tokens, special_tokens=special_tokens)
        return await self._joined(write(chain.from_iterable(map(work, _parts(texts)))))

    async def decode(self, sequences: Iterable[Int32], *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence of ids, i32[n], which are in [0, vocab_size)."""
        work = partial(self._tokenizer.decode, sequences, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _joined(self, parts: Iterator[bytes]) -> bytes:
        """All parts, each made in a thread. If this is cancelled, the one that is being made is the last."""
        loop = asyncio.get_running_loop()
        made: list[bytes] = []
        while part := await loop.run_in_executor(self._threads, next, parts, b""):
            made.append(part)
        return await loop.run_in_executor(self._threads, b"".join, made)

    def close(self) -> None:
        """Give up what waits and let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """`texts` in runs of at most _PART_CHARS characters, or of a single longer text."""
    start = chars = 0
    for index, text in enumerate(texts):
        if index > start and chars + len(text) > _PART_CHARS:
            yield texts[start:index]
            start, chars = index, 0
        chars += len(text)
    yield texts[start:]
