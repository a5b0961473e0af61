"""What a compiled tokeniser is to the code that drives it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from gateway.tokenization.kernels.arrays import Array, Bytes, Int64


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

    def prepare(self, text: str) -> bytes | None:
        """What `run` reads of a text, in UTF-8. None: the text is not for this kernel.

        Raises:
            UnicodeEncodeError: it has a lone surrogate.
        """
        ...

    @property
    def arrays(self) -> list[Array]:
        """Its tables, in the order in which its code finds them."""
        ...

    def scratch(self, word_bytes: int) -> Sequence[Array]:
        """A thread's own buffers, for words of so many bytes."""
        ...

    def run(self, text: Bytes, bounds: Int64, memory: Int64) -> int:
        """Go on with the texts text[bounds[t]:bounds[t + 1]]; the answers are in arrays.py.

        memory: addresses of the arrays of Output, the state i64[32], `arrays`, `scratch` and those of Words.
        """
        ...

    def classify(self, block: int) -> None:
        """Ask the library about the 256 code points from 256 * block on."""
        ...

    def literal(self) -> Kernel:
        """The same kernel, to which special tokens are ordinary text."""
        ...
