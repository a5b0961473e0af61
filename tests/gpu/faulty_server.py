"""server.py over the real engine, whose device breaks for good when a sequence begins with DEADLY."""

from __future__ import annotations

import sys

import torch

from cuda_utils.lazy_tensor import LazyTensor
from rose.batch import BatchResult, RaggedBatch
from rose.graph_engine import GraphEngine

DEADLY = 103

real_step = GraphEngine.step


def step(self: GraphEngine, batch: RaggedBatch) -> LazyTensor[BatchResult]:
    """As the engine's own, behind a kernel that fails an assertion on the device."""
    if DEADLY in batch.input_ids[batch.cu_seqlens[:-1]]:
        torch._assert_async(torch.zeros(1, device=self.info.device.split()[0]))
    return real_step(self, batch)


if __name__ == "__main__":
    GraphEngine.step = step  # type: ignore[method-assign]
    import server

    sys.exit(server.main())
