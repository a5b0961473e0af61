"""What a step accepts.

Offsets must be right before anything is launched: kernels find their memory by them. Ids need not, on a
device: its embedding kernels take one out of range for 0, so that it may be looked for while the step runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        """Length of the longest sequence of `batch`, in tokens. Ids and types are not looked at.

        Raises:
            StepError: the batch is empty, too large or malformed; the message names the value and the limit.
        """
        num_seqs, num_tokens = len(batch.cu_seqlens) - 1, len(batch.input_ids)
        if not 1 <= num_seqs <= self.max_batch_seqs:
            raise StepError(f"batch has {num_seqs} sequences; a step takes 1 to {self.max_batch_seqs}")
        if num_tokens > self.max_batch_tokens:
            raise StepError(f"batch has {num_tokens} tokens; a step takes {self.max_batch_tokens}")
        offsets = batch.cu_seqlens.tolist()  # a numpy reduction takes 2 µs or more whatever its size
        if offsets[0] != 0 or offsets[-1] != num_tokens:
            raise StepError(f"offsets span {offsets[0]}..{offsets[-1]}; the batch has {num_tokens} tokens")
        lengths = [num_tokens] if num_seqs == 1 else list(map(sub, offsets[1:], offsets))
        longest: int = max(lengths)
        if longest > self.max_model_len:
            raise StepError(f"sequence has {longest} tokens; this model takes {self.max_model_len}")
        if min(lengths) < 1:
            raise StepError("batch has an empty sequence")
        if batch.token_type_ids is not None and len(batch.token_type_ids) != num_tokens:
            raise StepError(f"batch has {num_tokens} tokens but not as many token types")
        if batch.spans is not None:
            self._check_spans(batch, batch.spans)
        if batch.token_outputs:
            self._check_token_outputs(batch)
        return longest

    def check_ids(self, batch: RaggedBatch) -> None:
        """Look at every id and type of a batch that `check` took.

        Raises:
            StepError: one is out of range; the message names it.
        """
        for values, limit, noun in self._ids_of(batch):
            if _any_beyond(values, limit):
                wrong = values[(values < 0) | (values >= limit)][0]
                raise StepError(f"{noun} {wrong} is out of range; this model takes 0 to {limit - 1}")

    def wrong_rows(self, batch: RaggedBatch) -> list[int]:
        """The rows of the result whose sequence holds an id or type out of range. 3 µs if there is none."""
        if not any(_any_beyond(values, limit) for values, limit, _ in self._ids_of(batch)):
            return []
        tokens = np.zeros(batch.num_tokens, np.bool_)
        for values, limit, _ in self._ids_of(batch):
            tokens |= (values < 0) | (values >= limit)
        seqs = np.logical_or.reduceat(tokens, batch.cu_seqlens[:-1])
        if batch.spans is None:
            return np.flatnonzero(seqs).tolist()
        owners = np.searchsorted(batch.cu_seqlens, batch.spans[:, 0], side="right") - 1
        return np.flatnonzero(seqs[np.minimum(owners, batch.num_seqs - 1)]).tolist()

    def _ids_of(self, batch: RaggedBatch) -> Iterator[tuple[Int32, int, str]]:
        """What is looked up in tables, how many rows these have, and what it is called."""
        yield batch.input_ids, self.vocab_size, "token id"
        if batch.token_type_ids is not None:
            # A model without a table of types ignores zeros, which mean "all of one kind".
            yield batch.token_type_ids, max(self.type_vocab_size, 1), "token type"

    def _check_token_outputs(self, batch: RaggedBatch) -> None:
        unknown = sorted(kind for kind in batch.token_outputs if kind not in self.token_bytes)
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


def _any_beyond(values: Int32, limit: int) -> bool:
    # Seen as unsigned, a negative number is a huge one: one reduction checks both ends.
    return bool(np.maximum.reduce(values.view(np.uint32)) >= limit)
