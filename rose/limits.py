"""What a step accepts. On the device an id out of range is an illegal access, which kills the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import sub

import numpy as np

from rose.batch import Int32, RaggedBatch, TokenOutput
from rose.errors import StepError


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one loaded model. type_vocab_size: 0 for models without token types.

    has_spans: whether the model pools by mean, so that rows may be parts of sequences.
    token_bytes: what each kind of token output takes a token. max_token_bytes: of all of them in a step.
    """

    max_batch_tokens: int
    max_batch_seqs: int
    max_model_len: int
    vocab_size: int
    type_vocab_size: int
    has_spans: bool = False
    token_bytes: Mapping[TokenOutput, int] = field(default_factory=dict)
    max_token_bytes: int = 0

    def check(self, batch: RaggedBatch) -> int:
        """Length of the longest sequence of `batch`, in tokens. 3 µs for one sequence, 9 µs for 100.

        Raises:
            StepError: the batch is empty, too large or malformed; the message names the value and the limit.
        """
        num_seqs, num_tokens = batch.num_seqs, batch.num_tokens
        if not 1 <= num_seqs <= self.max_batch_seqs:
            raise StepError(f"batch has {num_seqs} sequences; a step takes 1 to {self.max_batch_seqs}")
        if num_tokens > self.max_batch_tokens:
            raise StepError(f"batch has {num_tokens} tokens; a step takes {self.max_batch_tokens}")
        offsets = batch.cu_seqlens.tolist()  # a numpy reduction takes 2 µs or more whatever its size
        if offsets[0] != 0 or offsets[-1] != num_tokens:
            raise StepError(f"offsets span {offsets[0]}..{offsets[-1]}; the batch has {num_tokens} tokens")
        lengths = list(map(sub, offsets[1:], offsets))
        longest: int = max(lengths)
        if longest > self.max_model_len:
            raise StepError(f"sequence has {longest} tokens; this model takes {self.max_model_len}")
        if min(lengths) < 1:
            raise StepError("batch has an empty sequence")
        _check_range(batch.input_ids, self.vocab_size, "token id")
        if batch.token_type_ids is not None:
            self._check_types(batch)
        if batch.spans is not None:
            self._check_spans(batch, batch.spans)
        if batch.token_outputs:
            self._check_token_outputs(batch)
        return longest

    def _check_token_outputs(self, batch: RaggedBatch) -> None:
        unknown = sorted(batch.token_outputs - self.token_bytes.keys())
        if unknown:
            raise StepError(f"batch asks for {unknown[0]} of its tokens; this model does not give it")
        nbytes = batch.num_tokens * sum(self.token_bytes[kind] for kind in batch.token_outputs)
        if nbytes > self.max_token_bytes:
            raise StepError(
                f"token outputs of a batch take {nbytes} bytes; a step gives {self.max_token_bytes}"
            )

    def _check_spans(self, batch: RaggedBatch, spans: Int32) -> None:
        if not self.has_spans:
            raise StepError("batch has spans; this model does not pool by mean")
        if spans.ndim != 2 or spans.shape[1] != 2 or not 1 <= len(spans) <= self.max_batch_seqs:
            limit = f"a step takes [1 to {self.max_batch_seqs}, 2]"
            raise StepError(f"batch has spans of shape {list(spans.shape)}; {limit}")
        starts, ends = spans[:, 0], spans[:, 1]
        first = np.searchsorted(batch.cu_seqlens, starts, side="right")
        # The end of the sequence that a span starts in; a span may also be empty at the batch's own end.
        stops = batch.cu_seqlens[np.minimum(first, batch.num_seqs)]
        wrong = (starts < 0) | (ends < starts) | (ends > stops)
        if wrong.any():
            start, end = spans[wrong.argmax()]
            raise StepError(f"span {start}..{end} does not lie within one sequence")

    def _check_types(self, batch: RaggedBatch) -> None:
        types = batch.token_type_ids
        if types is None or len(types) != batch.num_tokens:
            raise StepError(f"batch has {batch.num_tokens} tokens but not as many token types")
        # A model without a table of types ignores zeros, which mean "all of one kind".
        _check_range(types, max(self.type_vocab_size, 1), "token type")


def _check_range(ids: np.ndarray[tuple[int], np.dtype[np.int32]], limit: int, noun: str) -> None:
    # Seen as unsigned, a negative number is a huge one: one reduction checks both ends.
    if np.maximum.reduce(ids.view(np.uint32)) >= limit:
        wrong = ids[(ids < 0) | (ids >= limit)][0]
        raise StepError(f"{noun} {wrong} is out of range; this model takes 0 to {limit - 1}")
