"""Rows reach the address that is staged when the kernel runs, and nothing around it."""

from __future__ import annotations

import pytest
import torch

from rose.kernels.jit.delivery import deliver


@pytest.mark.parametrize("count", [1, 1023, 1024, 5120])
def test_words_go_where_the_address_says(count, device):
    pinned = device != "cpu"
    words = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=device)
    target = torch.full((count + 2,), 77, dtype=torch.int32, pin_memory=pinned)
    address = torch.tensor([0], dtype=torch.int64, device=device)
    deliver(address, words)
    address[0] = target.data_ptr() + 4
    deliver(address, words)
    if pinned:
        torch.cuda.synchronize()
    assert torch.equal(target[1:-1], words.cpu())
    assert target[0] == target[-1] == 77
