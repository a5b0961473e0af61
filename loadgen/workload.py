"""The inputs of requests: random token ids, or text cut from a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.plan import Shape, Source, Stream

Ids = npt.NDArray[np.int32]
# Special tokens have low ids in every vocabulary of the field (BERT's unused ones reach 998).
FIRST_ORDINARY_ID = 1000
# Distinct requests of a stream: enough that no cache of a few could serve them, few enough to make quickly.
MAX_DISTINCT = 64
MAX_DISTINCT_TOKENS = 1_000_000


@dataclass(frozen=True)
class Inputs:
    """What one request embeds: ids i32[n] of each sequence, or texts. tokens: all, None if only the server knows."""

    ids: tuple[Ids, ...] = ()
    texts: tuple[str, ...] = ()
    tokens: int | None = None

    def __len__(self) -> int:
        return len(self.ids) or len(self.texts)


def distinct_requests(stream: Stream) -> int:
    """How many different requests a stream cycles through."""
    shape = stream.shape
    return max(2, min(MAX_DISTINCT, MAX_DISTINCT_TOKENS // (shape.batch * shape.high)))


def random_inputs(shape: Shape, source: Source, rng: np.random.Generator) -> Inputs:
    """Random ids of exactly the lengths asked for."""
    first = min(FIRST_ORDINARY_ID, source.vocab_size // 2)
    lengths = rng.integers(shape.low, shape.high, shape.batch, endpoint=True)
    ids = tuple(rng.integers(first, source.vocab_size, int(n), dtype=np.int32) for n in lengths)
    return Inputs(ids=ids, tokens=int(lengths.sum()))


def inputs(stream: Stream, source: Source, rng: np.random.Generator) -> Iterator[Inputs]:
    """Inputs of a stream's requests, without end."""
    while True:
        yield random_inputs(stream.shape, source, rng)
