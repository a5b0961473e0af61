"""Rows reach the address that is staged when the kernel runs, their squares behind them, and nothing more."""

from __future__ import annotations

import pytest
import torch

from rose.kernels.jit.delivery import deliver


@pytest.mark.parametrize("behind", [0, 1, 5, 1030], ids=lambda count: f"{count} words behind")
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 1024), (5, 1023), (3, 2500), (4, 384)])
def test_words_go_where_the_address_says(rows, width, behind, device):
    pinned, count = device != "cpu", rows * width + behind
    vectors = torch.randn(rows, width)
    others = torch.randint(-(2**31), 2**31 - 1, (behind,), dtype=torch.int32)
    words = torch.cat([vectors.view(torch.int32).flatten(), others]).to(device)
    target = torch.full((count + rows + 2,), 77, dtype=torch.int32, pin_memory=pinned)
    address = torch.tensor([0], dtype=torch.int64, device=device)
    deliver(address, words, (rows, width))
    if pinned:
        torch.cuda.synchronize()
    assert (target == 77).all()
    address[0] = target.data_ptr() + 4
    deliver(address, words, (rows, width))
    if pinned:
        torch.cuda.synchronize()
    assert torch.equal(target[1 : 1 + count], words.cpu())
    assert target[0] == target[-1] == 77
    squares = target[1 + count : -1].view(torch.float32)
    torch.testing.assert_close(squares, vectors.square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_the_square_of_what_is_not_finite_or_too_large_is_not(bad, device):
    vectors = torch.ones(3, 700)
    vectors[1, 699] = bad
    target = torch.zeros(3 * 701, pin_memory=device != "cpu")
    address = torch.tensor([target.data_ptr()], dtype=torch.int64, device=device)
    deliver(address, vectors.view(torch.int32).flatten().to(device), (3, 700))
    if device != "cpu":
        torch.cuda.synchronize()
    assert torch.isfinite(target[2100:]).tolist() == [True, False, True]
