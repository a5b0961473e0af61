"""The poolings by torch's segment kernels, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from rose.device_batch import Outputs
from rose.kernels.segments import max_pool, weighted_mean_pool


@pytest.mark.parametrize("lengths", [[1], [3, 0, 40, 1], [0, 2, 0]])
@pytest.mark.parametrize("pool", [max_pool, weighted_mean_pool])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_sequence_by_itself(pool, lengths, dtype, device):
    """Values below zero, padding that is larger than any, and empty sequences, which give zeros."""
    total = sum(lengths)
    hidden = (torch.randn(total + 3, 20, device=device) - 3).to(dtype)
    hidden[total:] = 100.0
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    vectors = torch.full((len(lengths), 20), float("nan"), device=device)
    int8 = torch.full((len(lengths), 20), 77, dtype=torch.int8, device=device)
    pool(hidden, offsets, Outputs(vectors, int8))
    for row, (length, part) in enumerate(zip(lengths, hidden[:total].float().split(lengths), strict=True)):
        expected = torch.zeros(20, device=device)
        if length and pool is max_pool:
            expected = part.max(0).values
        elif length:
            weights = torch.arange(1, length + 1, device=device).float()
            expected = (part * weights[:, None]).sum(0) / weights.sum()
        torch.testing.assert_close(vectors[row], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(int8, torch.round(torch.tanh(vectors) * 127).to(torch.int8))
