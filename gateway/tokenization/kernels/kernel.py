"""What a compiled tokeniser is to the code that drives it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.tokenization.kernels.arrays import Array


class Kernel(Protocol):
    """One tokenizer.json's compiled code and tables, which threads share."""

    @property
    def name(self) -> str:
        """Its algorithm, for /info."""
        ...

    @property
    def parting(self) -> re.Pattern[str] | None:
        """Where a text can be parted, before the second character, and its ids with it; None: nowhere."""
        ...

    @property
    def prepare(self) -> Callable[[str], bytes | None]:
        """What `run` reads of a text, in UTF-8. None: the text is not for this kernel.

        It raises UnicodeEncodeError if the text has a lone surrogate.
        """
        ...

    @property
    def arrays(self) -> list[Array]:
        """Its tables, in the order in which its code finds them."""
        ...

    def scratch(self, word_bytes: int) -> Sequence[Array]:
        """A thread's own buffers, for words of so many bytes."""
        ...

    @property
    def run(self) -> Callable[[bytes, int, int, int, int], int]:
        """run(text, memory, num_texts, first, most): ids of the texts from the `first` of the call's on.

        text: all of them in a row. memory: the address of the addresses and lengths, i64[2 n], of the arrays
        of Output, the state i64[32], `arrays`, `scratch` and those of Words. most: ids of a text's own. The
        answers are in arrays.py.
        """
        ...

    def classify(self, block: int) -> None:
        """Ask the library about the 256 code points from 256 * block on."""
        ...

    def literal(self) -> Kernel:
        """The same kernel, to which special tokens are ordinary text."""
        ...
