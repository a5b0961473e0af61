"""Overwrites what a batch with NaN may have left in the activations. Knows neither CUDA nor torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuda_utils.memcpy import Memcpy
from rose.batch import EngineInfo
from rose.buckets import sequence_bucket, token_bucket
from rose.graph_device import Forward
from rose.staging import StagingSlot
from rose.warmup import synthetic_batch


class ActivationReset:
    """A batch without padding over every row that steps use.

    Attention leaves padded rows as they were and may read them with weight zero. As 0 * NaN is NaN, what one
    batch left there would fail later ones that had nothing to do with it.
    slot: for this alone, staged once. So a reset takes no step's slot, whatever is in flight.
    """

    def __init__(self, forward: Forward, memcpy: Memcpy, info: EngineInfo, slot: StagingSlot) -> None:
        layout = forward.layout
        num_seqs = min(layout.max_seqs, info.max_batch_seqs)
        num_tokens = min(layout.max_tokens, num_seqs * info.max_model_len)
        batch = synthetic_batch(replace(info, max_batch_tokens=num_tokens), num_tokens, num_seqs)
        longest = int(np.diff(batch.cu_seqlens).max())
        key = forward.key_of(token_bucket(num_tokens), sequence_bucket(num_seqs), longest)
        self._forward = forward
        self._memcpy = memcpy
        self._slot = slot
        self._key = key._replace(num_tokens=num_tokens)
        self._nbytes = slot.fill(batch, num_tokens, key.num_seqs)

    def enqueue(self) -> None:
        """Behind all steps so far, and before what follows. Not again before the one before is done.

        Raises:
            Exception: what the device raised; then the activations count as not overwritten.
        """
        self._memcpy.host_to_device(self._forward.input_ptr, self._slot.ptr, self._nbytes)
        self._forward.plan(self._key, self._slot)
        self._forward.run(self._key, self._slot)
