"""What lies where in the page-locked memory that a step's results go to.

    [ vectors f32[S, D] | int8 i8[S, D], of models that have it
      | sums of squares f32[S], from a multiple of 4 bytes on
      | rows of tokens f32[T, W] of each kind that is asked for, from a multiple of 64 on ]

S and T are the buckets.
"""

from __future__ import annotations

import numpy as np

from cuda_utils.pinned import PinnedSlot
from rose.batch import BatchResult, EngineInfo, RaggedBatch
from rose.graph_device import Forward
from rose.graph_runner import GraphKey


class ResultLayout:
    """For the results of one model."""

    def __init__(self, forward: Forward, info: EngineInfo) -> None:
        self._output_bytes = forward.output_bytes
        self._has_squares = forward.delivers
        self._info = info

    def nbytes(self, key: GraphKey) -> int:
        """Of all that a step of this shape gives."""
        if not key.tokens:
            return self.delivered_bytes(key.num_seqs)
        return self.tokens_at(key.num_seqs) + key.num_tokens * self._info.bytes_a_token(key.tokens)

    def delivered_bytes(self, num_seqs: int) -> int:
        """Of all but what tokens give."""
        return self._squares_at(num_seqs) + 4 * num_seqs

    def tokens_at(self, num_seqs: int) -> int:
        """Where the rows of tokens begin."""
        return _aligned(self.delivered_bytes(num_seqs), 64)

    def rows(self, result: PinnedSlot, batch: RaggedBatch, key: GraphKey) -> BatchResult:
        """Views of the rows of `batch` among the padded ones that the device writes to `result`."""
        shape = (batch.num_rows, self._info.dimensions)
        vectors, int8, squares = result.view(np.float32, shape), None, None
        if self._info.has_int8:
            int8 = result.view(np.int8, shape, 4 * key.num_seqs * shape[1])
        if self._has_squares:
            squares = result.view(np.float32, shape[:1], self._squares_at(key.num_seqs))
        if not key.tokens:
            return BatchResult(vectors, int8, squares=squares)
        at, tokens = self.tokens_at(key.num_seqs), {}
        for kind in key.tokens:
            width = self._info.token_outputs[kind]
            tokens[kind] = result.view(np.float32, (batch.num_tokens, width), at)
            at += 4 * key.num_tokens * width
        return BatchResult(vectors, int8, squares=squares, tokens=tokens)

    def _squares_at(self, num_seqs: int) -> int:
        return _aligned(self._output_bytes(num_seqs), 4)


def _aligned(nbytes: int, to_bytes: int) -> int:
    """The next multiple of `to_bytes`."""
    return -(-nbytes // to_bytes) * to_bytes
