"""A tokenizer that gets faster while it serves: making or loading machine code must not delay a start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

from gateway.tokenization.base import PairTokens, SpecialTokens, TextTokens, Tokenizer
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Int32


class LateTokenizer:
    """The library's tokenizer until what `make` gives takes over; the ids are the same.

    make: gives the tokenizer to go on with, for ever: the library's, if there is none that is faster.
    """

    def __init__(self, reference: HuggingFaceTokenizer, make: Callable[[], Tokenizer]) -> None:
        self._reference = reference
        self._make = make
        self._now: Tokenizer = reference
        self._made: Future[Tokenizer] = Future()

    def start(self) -> None:
        """Call `make` in a thread of its own; a server does so once it is ready."""
        threading.Thread(target=self._run, name="tokenizer-compiler", daemon=True).start()

    def wait(self) -> Tokenizer:
        """What `make` gives, once it has."""
        return self._made.result()

    def _run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:  # whoever waits hears of it, and the library goes on
            self._made.set_exception(error)
        else:
            self._now = made  # before anybody who waits goes on
            self._made.set_result(made)

    @property
    def vocab_size(self) -> int:
        """The highest id it can give, plus one."""
        return self._reference.vocab_size

    @property
    def special_tokens(self) -> SpecialTokens:
        """What the file's template adds to each text."""
        return self._reference.special_tokens

    @property
    def pair_tokens(self) -> PairTokens:
        """What the file's template adds to two texts."""
        return self._reference.pair_tokens

    @property
    def backend(self) -> str:
        """What makes the ids now, for /info."""
        return self._now.backend

    @property
    def speedup(self) -> int:
        """See Tokenizer; as of now."""
        return self._now.speedup

    def literal(self) -> LateTokenizer:
        """The same to which special tokens are ordinary words. It is faster when this one is."""
        made = LateTokenizer(self._reference.literal(), lambda: self._made.result().literal())
        self._made.add_done_callback(lambda _: made.start())
        return made

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> Sequence[Int32]:
        """See Tokenizer."""
        return self._now.encode(texts, max_tokens)

    def encode_ends(self, texts: Sequence[str], max_tokens: int) -> Sequence[Int32]:
        """See Tokenizer."""
        return self._now.encode_ends(texts, max_tokens)

    def tokens(self, texts: Sequence[str], *, special_tokens: bool) -> Iterator[TextTokens]:
        """See Tokenizer."""
        return self._reference.tokens(texts, special_tokens=special_tokens)

    def decode(self, sequences: Iterable[Int32], *, skip_special_tokens: bool) -> list[str]:
        """See Tokenizer."""
        return self._reference.decode(sequences, skip_special_tokens=skip_special_tokens)
