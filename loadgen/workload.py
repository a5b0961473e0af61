"""The inputs of requests: random token ids, or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.plan import Source

Ids = npt.NDArray[np.int32]
# Special tokens have low ids in every vocabulary of the field (BERT's unused ones reach 998).
FIRST_ORDINARY_ID = 1000


@dataclass(frozen=True)
class Inputs:
    """What one request embeds: ids i32[n] of each sequence, or texts. tokens: None when not known."""

    ids: tuple[Ids, ...] = ()
    texts: tuple[str, ...] = ()
    tokens: int | None = None

    def __len__(self) -> int:
        return len(self.ids) or len(self.texts)

    def rows(self, numbers: Sequence[int]) -> Inputs:
        """Some of the sequences."""
        return Inputs(
            tuple(self.ids[n] for n in numbers if self.ids),
            tuple(self.texts[n] for n in numbers if self.texts),
        )


def random_ids(lengths: Sequence[int], source: Source, rng: np.random.Generator) -> tuple[Ids, ...]:
    """Ids i32[n] for each of `lengths`."""
    first = min(FIRST_ORDINARY_ID, source.vocab_size // 2)
    return tuple(rng.integers(first, source.vocab_size, n, dtype=np.int32) for n in lengths)
