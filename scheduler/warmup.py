"""The first, slow steps of an engine, run before a client waits for them."""

from __future__ import annotations

import numpy as np

from rose.batch import EngineInfo
from scheduler.batcher import Batcher

# Tokens of each sequence of the batches: they page in weights, code and thread pools.
_BATCHES = ((8,), (16, 32))


async def warm_up(batcher: Batcher, info: EngineInfo) -> None:
    """Run a small batch and a larger one.

    Raises:
        SchedulerError: a step failed.
    """
    for lengths in _BATCHES:
        sizes = [min(length, info.max_model_len, info.max_batch_tokens) for length in lengths]
        batch = [np.arange(size, dtype=np.int32) % info.vocab_size for size in sizes][: info.max_batch_seqs]
        await batcher.run(batch)
