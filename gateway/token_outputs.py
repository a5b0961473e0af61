"""What the tokens of texts give, as the engine leaves it and as clients want it, and how much may be at once.

BGE-M3's rules: a word weighs what the heaviest of its tokens does, special tokens nothing; a text's vectors
are those of its tokens but the first, <s>. Source: FlagEmbedding, inference/embedder/encoder_only/m3.py.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gateway.errors import ApiError, ErrorKind, retry_headers
from rose.batch import Float32, Int32, RaggedIds, TokenOutput

_RETRY_AFTER_S = 1.0
_TEXTS_A_TURN = 16  # some 30 µs each, if they are short


class Hold:
    """Bytes of a TokenBudget; they are given back when this is gone, which is when the answer is made."""

    __slots__ = ("_budget", "_nbytes")

    def __init__(self, budget: TokenBudget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._budget.held_bytes -= self._nbytes


class TokenBudget:
    """How many bytes of token outputs the requests under way may come to. held_bytes: those that do now."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def hold(self, nbytes: int) -> Hold:
        """Take `nbytes`; a request of any size may have them when no other does.

        Raises:
            ApiError: OVERLOADED, when they are more than what is left.
        """
        if self.held_bytes and self.held_bytes + nbytes > self.max_bytes:
            message = (
                f"what tokens give takes {nbytes} bytes beside {self.held_bytes} of other requests; at most"
                f" {self.max_bytes} may be under way"
            )
            raise ApiError(ErrorKind.OVERLOADED, message, headers=retry_headers(_RETRY_AFTER_S))
        hold = Hold(self, nbytes)
        self.held_bytes += nbytes
        return hold


@dataclass(frozen=True, slots=True)
class Words:
    """What the words of one text weigh: indices i32[k], rising, and their values f32[k], all above 0."""

    indices: Int32
    values: Float32


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of texts' tokens: values f32[m, W], text number i having those of offsets[i:i+2]."""

    values: Float32
    offsets: Sequence[int]

    @property
    def texts(self) -> list[Float32]:
        """Each text's rows, as views."""
        return [self.values[start:end] for start, end in pairwise(self.offsets)]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a job's tokens gave: f32[T, W] of each kind, of all `sequences` end to end.

    hold: see TokenBudget.
    """

    sequences: RaggedIds
    values: Mapping[TokenOutput, Float32]
    hold: Hold

    def check(self) -> None:
        """Refuse a NaN or an infinity, which the vectors need not show.

        Raises:
            ApiError: NON_FINITE_OUTPUT.
        """
        for kind, values in self.values.items():
            # The square of what is not finite is not either, and this takes half the time of a look at all.
            if not math.isfinite(np.vdot(values, values)) and not np.isfinite(values).all():
                message = f"the model gave {kind} of a token that is not finite"
                raise ApiError(ErrorKind.NON_FINITE_OUTPUT, message)

    async def words(self, unweighted: tuple[int, ...]) -> list[Words]:
        """The words of each text. unweighted: ids that weigh nothing. Gives the loop a turn between texts."""
        words: list[Words] = []
        weights = self.values["lexical"][:, 0]
        for ids, (start, end) in zip(self.sequences, pairwise(self.sequences.offsets), strict=True):
            if len(words) % _TEXTS_A_TURN == _TEXTS_A_TURN - 1:
                await asyncio.sleep(0)
            words.append(heaviest(ids, weights[start:end], unweighted))
        return words

    def hidden(self) -> TokenRows:
        """All tokens' hidden states."""
        return TokenRows(self.values["hidden"], self.sequences.offsets)

    def vectors(self) -> TokenRows:
        """Vectors of all tokens but the first of each text."""
        values, starts = self.values["multi_vector"], self.sequences.offsets
        offsets = [start - index for index, start in enumerate(starts)]
        if len(self.sequences) == 1:
            return TokenRows(values[1:], offsets)
        kept = np.ones(len(values), np.bool_)
        kept[list(starts[:-1])] = False
        return TokenRows(values[kept], offsets)


def heaviest(ids: Int32, weights: Float32, unweighted: tuple[int, ...]) -> Words:
    """Each distinct id of i32[n], its largest weight of f32[n]; without `unweighted` and what weighs 0."""
    kept = weights > 0
    for special in unweighted:
        kept &= ids != special
    indices, place = np.unique(ids[kept], return_inverse=True)
    values = np.zeros(len(indices), np.float32)
    np.maximum.at(values, place, weights[kept])
    return Words(indices, values)


def nonzero(row: Float32) -> Words:
    """The words that weigh in f32[V], a value for each word of the vocabulary."""
    indices: NDArray[np.int32] = np.flatnonzero(row).astype(np.int32)
    return Words(indices, row[indices])
