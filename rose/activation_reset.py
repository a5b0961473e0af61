"""Overwrites what a batch with NaN may have left in the activations. Knows neither CUDA nor torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cuda_utils.memcpy import Memcpy
from rose.batch import EngineInfo
from rose.buckets import sequence_bucket, token_bucket
from rose.engine_options import DEFAULT_BATCH_TOKENS
from rose.graph_device import Forward
from rose.graph_runner import GraphKey
from rose.staging import StagingSlot
from rose.warmup import synthetic_batch

# Most steps have no more; one of the largest size takes a quarter of a second.
USUAL_TOKENS = DEFAULT_BATCH_TOKENS


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is staged in `slot`: nbytes, without padding."""

    key: GraphKey
    slot: StagingSlot
    nbytes: int


class ActivationReset:
    """A batch without padding over every row that steps of some size use.

    Attention leaves padded rows as they were and may read them with weight zero. As 0 * NaN is NaN, what one
    batch left there would fail later ones that had nothing to do with it.
    slots: two, for this alone, staged once. So a reset takes no step's slot, whatever is in flight.
    """

    def __init__(
        self, forward: Forward, memcpy: Memcpy, info: EngineInfo, slots: tuple[StagingSlot, StagingSlot]
    ) -> None:
        self._forward = forward
        self._memcpy = memcpy
        layout = forward.layout
        num_seqs = min(layout.max_seqs, info.max_batch_seqs)
        most = min(layout.max_tokens, num_seqs * info.max_model_len)
        sizes = (min(USUAL_TOKENS, most), most)
        self._batches = [
            _staged(forward, info, slot, size, num_seqs) for slot, size in zip(slots, sizes, strict=True)
        ]

    def enqueue(self, num_tokens: int) -> int:
        """Overwrite the rows of steps of up to num_tokens, behind all steps so far and before what follows.

        Returns the number of rows that are overwritten. Not again before the one before is done.

        Raises:
            Exception: what the device raised; then the activations count as not overwritten.
        """
        usual, largest = self._batches
        batch = usual if num_tokens <= usual.key.num_tokens else largest
        self._memcpy.host_to_device(self._forward.input_ptr, batch.slot.ptr, batch.nbytes)
        self._forward.plan(batch.key, batch.slot)
        self._forward.run(batch.key, batch.slot)
        return max(num_tokens, batch.key.num_tokens)

    def close(self) -> None:
        """Let go of its slots; nothing is overwritten any more."""
        self._batches.clear()


def _staged(forward: Forward, info: EngineInfo, slot: StagingSlot, num_tokens: int, num_seqs: int) -> _Batch:
    batch = synthetic_batch(replace(info, max_batch_tokens=num_tokens), num_tokens, num_seqs)
    longest = int(np.diff(batch.cu_seqlens).max())
    key = forward.key_of(token_bucket(num_tokens), sequence_bucket(num_seqs), longest)
    return _Batch(key._replace(num_tokens=num_tokens), slot, slot.fill(batch, num_tokens, key.num_seqs))
