"""Products that end in the residual stream, on a Hopper GPU: against fp64, and launches behind each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rose.aot.products import RESIDUAL_PRODUCT
from rose.kernels.cuda.pingpong import FEATURES
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedGemm, load

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
PADDING = 300  # rows past M that must stay as they are: more than a tile has


def loaded() -> FusedGemm:
    gemm = load(RESIDUAL_PRODUCT)
    if gemm is None:
        pytest.skip("no Hopper GPU, or python -m rose.kernels.cuda.build has not been run")
    return gemm


def random(*shape: int, std: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda").normal_(std=std)


def run(kernel: FusedGemm, factors: Sequence[Tensor], start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new residual, hidden and partial sums; checks that nothing behind them was written."""
    x, weight, columns = factors
    m, n = start.shape
    residual, hidden = torch.full((2, m + PADDING, n), torch.nan, dtype=BF16, device="cuda")
    sums = torch.full((m * n // FEATURES + PADDING,), torch.nan, device="cuda")
    residual[:m] = start
    partial = kernel.residual(x, weight, residual[:m], columns, hidden[:m], sums)
    assert all(memory[m:].isnan().all() for memory in (residual, hidden))
    assert sums[partial.numel() :].isnan().all()
    return residual[:m], hidden[:m], partial


# Blocks of one tile, and of odd and even numbers of them. The last two: tiles of fewer chunks than there are
# slots, which then hold several tiles, and of about as many.
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((m, 1024, k) for m in (1, 15, 160, 161, 2559, 4096, 12799, 12800, 21197) for k in (2048, 3072)),
        (21197, 1024, 64),
        (9000, 512, 320),
    ],
)
def test_a_product_against_fp64_twice(m: int, n: int, k: int) -> None:
    kernel, start = loaded(), random(m, n)
    factors = (random(m, k), random(n, k, std=0.02), random(n))
    x, weight, columns = factors
    total = start.double() + x.double() @ weight.double().T
    results = run(kernel, factors, start)
    for actual, expected in zip(results[:2], (total, total * columns.double()), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-10)
    squares = total.square().view(m, -1, FEATURES).sum(2)
    torch.testing.assert_close(results[2].double(), squares, rtol=2e-4, atol=0)
    for early in Early:
        with launching(early):
            again = run(kernel, factors, start)
        assert all(torch.equal(*pair) for pair in zip(again, results, strict=True))


def test_launches_behind_each_other_in_a_graph() -> None:
    """Six, early, of which each takes what the one before made."""
    kernel, start, x = loaded(), random(2000, 1024), random(2000, 1024)
    weight, columns = random(1024, 1024, std=0.02), random(1024)
    residual, rows = torch.empty_like(start), [x.clone(), random(2000, 1024)]
    sums = torch.empty(2000 * 1024 // FEATURES, device="cuda")

    def chain() -> None:
        for turn in range(6):
            given, made = rows[turn % 2], rows[1 - turn % 2]
            kernel.residual(given, weight, residual, columns, made, sums)

    residual.copy_(start)
    chain()
    expected = [tensor.clone() for tensor in (residual, *rows, sums)]
    assert torch.isfinite(expected[0]).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), launching(Early.AFTER_WAIT):
        chain()
    for _ in range(3):
        residual.copy_(start)
        rows[0].copy_(x)
        graph.replay()
        results = (residual, *rows, sums)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
