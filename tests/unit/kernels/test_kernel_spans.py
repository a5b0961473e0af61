"""Means of runs of rows that overlap, have gaps, are empty, or lie in any order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from rose.device_batch import Outputs
from rose.kernels import pooling
from rose.kernels.jit import pooling as jit
from rose.kernels.norm import RmsNorm

BOUNDS = [[5, 0, -1, 7, 0, 9], [-1, 1, -1, 7, -1, 20]]  # starts over ends; -1: the number of rows


@pytest.mark.parametrize(
    ("num_tokens", "quantized", "norm"),
    [*product([30], [True, False], [True, False]), (300, True, False), (300, False, True)],
)
def test_spans(
    num_tokens: int, quantized: bool, norm: bool, device: str, poisoned: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(num_tokens)
    hidden, residual = torch.randn(2, num_tokens, 96, device=device).unbind()
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    bounds[bounds == -1] = num_tokens
    found = Outputs(
        poisoned(6, 96, dtype=torch.float32), poisoned(6, 96, dtype=torch.int8) if quantized else None
    )
    last = pooling.LastHidden(hidden, residual, RmsNorm(torch.randn(96, device=device), 1e-6))
    scratch = pooling.pool_scratch(96, device)
    rows = hidden
    if norm:
        jit.norm_mean_pool(last, bounds, found, scratch)
        total = hidden + residual
        rows = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * last.norm.weight
    else:
        jit.mean_pool(hidden, bounds, found, scratch)
    expected = torch.stack(
        [rows[start:end].sum(0) / max(end - start, 1) for start, end in bounds.t().tolist()]
    )
    torch.testing.assert_close(found.vectors, expected, rtol=2e-5, atol=2e-5)
    assert not found.vectors[2].any() and not found.vectors[3].any()
    if found.int8 is not None:
        assert (found.int8.int() - torch.round(torch.tanh(expected) * 127).int()).abs().max() <= 1


def test_offsets_and_the_same_spans_give_the_same_bits(device: str) -> None:
    hidden = torch.randn(200, 96, device=device)
    offsets = torch.tensor([0, 3, 120, 200], dtype=torch.int32, device=device)
    by_offsets, by_spans = (Outputs(torch.empty(3, 96, device=device)) for _ in range(2))
    scratch = pooling.pool_scratch(96, device)
    jit.mean_pool(hidden, offsets, by_offsets, scratch)
    jit.mean_pool(hidden, torch.stack([offsets[:-1], offsets[1:]]), by_spans, scratch)
    assert torch.equal(by_offsets.vectors, by_spans.vectors)


def test_plain_torch_pools_spans_too() -> None:
    hidden = torch.randn(10, 8)
    outputs = Outputs(torch.empty(3, 8))
    pooling.mean_pool(hidden, torch.tensor([[2, 0, 4], [9, 10, 4]]), outputs, pooling.pool_scratch(8, "cpu"))
    expected = torch.stack([hidden[2:9].mean(0), hidden.mean(0), torch.zeros(8)])
    torch.testing.assert_close(outputs.vectors, expected)
