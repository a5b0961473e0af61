"""What an engine runs before it serves: every size once, timed, with made-up batches. Knows no CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from rose.batch import EngineInfo, RaggedBatch
from rose.buckets import sequence_bucket, shapes, token_bucket
from rose.graph_runner import GraphDevice, GraphKey
from rose.inflection import ForwardTime
from rose.staging import StagingSlot

_TYPICAL_LENGTH = 512
_TRIES = 3


def feasible_shapes(info: EngineInfo, max_tokens: int) -> Iterator[tuple[int, int]]:
    """(token bucket, sequence bucket) of every batch up to max_tokens that can occur, the largest first.

    Few sequences cannot be many tokens long, since none exceeds max_model_len.
    """
    for num_tokens, num_seqs in shapes(min(max_tokens, info.max_batch_tokens), info.max_batch_seqs):
        longest = min(num_seqs, info.max_batch_seqs) * info.max_model_len
        if token_bucket(min(num_tokens, longest)) == num_tokens:
            yield num_tokens, num_seqs


def synthetic_batch(info: EngineInfo, num_tokens: int, num_seqs: int) -> RaggedBatch:
    """Evenly long sequences that fill a bucket as far as the model's limits let them; ids 0, 1, 2, ..."""
    count = min(num_seqs, info.max_batch_seqs, info.max_batch_tokens)
    total = min(num_tokens, count * info.max_model_len, info.max_batch_tokens)
    cu_seqlens = (np.arange(count + 1, dtype=np.int64) * total // count).astype(np.int32)
    return RaggedBatch(np.arange(total, dtype=np.int32) % info.vocab_size, cu_seqlens)


class Warmup:
    """Runs synthetic batches on an idle device. stage: brings a batch to it as if a step followed."""

    def __init__(
        self,
        forward: GraphDevice[StagingSlot],
        key_of: Callable[[int, int, int], GraphKey],
        stage: Callable[[RaggedBatch, GraphKey], StagingSlot],
        synchronize: Callable[[], None],
        info: EngineInfo,
    ) -> None:
        self._forward = forward
        self._key_of = key_of
        self._stage = stage
        self._synchronize = synchronize
        self._info = info

    def keys(self, max_tokens: int) -> Iterator[GraphKey]:
        """Of all feasible shapes, the largest first."""
        for num_tokens, num_seqs in feasible_shapes(self._info, max_tokens):
            yield self._key_of(num_tokens, num_seqs, self._info.max_model_len)

    def work(self, key: GraphKey) -> StagingSlot:
        """Stage a batch of this shape once the device is idle."""
        self._synchronize()
        batch = synthetic_batch(self._info, key.num_tokens, key.num_seqs)
        return self._stage(batch, key)

    def run_once(self, num_tokens: int) -> None:
        """One eager forward, which may compile."""
        self._time_once(*self._typical(num_tokens))

    def time_forward(self, num_tokens: int) -> ForwardTime:
        """The quickest launch and the quickest end of three eager forwards, after one that may compile.

        Each by itself: others on the device lengthen the one, others on the processor the other.
        """
        key, work = self._typical(num_tokens)
        self._time_once(key, work)
        launches, totals = zip(*(self._time_once(key, work) for _ in range(_TRIES)), strict=True)
        return ForwardTime(min(launches), min(totals))

    def _typical(self, num_tokens: int) -> tuple[GraphKey, StagingSlot]:
        """A staged batch of about so many tokens."""
        length = min(_TYPICAL_LENGTH, self._info.max_model_len)
        num_seqs = min(-(-num_tokens // length), self._info.max_batch_seqs)
        bucket = token_bucket(num_tokens)
        key = self._key_of(bucket, sequence_bucket(num_seqs), -(-bucket // num_seqs))
        return key, self.work(key)

    def _time_once(self, key: GraphKey, work: StagingSlot) -> ForwardTime:
        self._synchronize()
        started = time.perf_counter()
        self._forward.run(key, work)
        launched = time.perf_counter()
        self._synchronize()
        return ForwardTime(launched - started, time.perf_counter() - started)
