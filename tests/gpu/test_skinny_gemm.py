"""skinny_gemm on a Hopper GPU: every plan worth trying against fp64, and launches that overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rose.kernels.activation import silu_mul
from rose.kernels.cuda.plan import SkinnyPlan
from rose.kernels.cuda.skinny_gemm import skinny_kernels
from rose.kernels.early import Early, launching
from rose.kernels.gemm import split_k_gemm, swiglu_gemm
from rose.kernels.norm import RmsNorm, add_rms_norm
from rose.kernels.tune_gemm import SHAPES, Shape, skinny_candidates

pytestmark = pytest.mark.gpu

# bf16 partial sums of fp32 accumulators: 0.0017 was the worst of all plans and shapes.
MAX_RELATIVE_ERROR = 4e-3
GUARD = 4096  # elements behind an output that must keep their poison


@pytest.fixture(autouse=True)
def _built() -> None:
    if not torch.cuda.is_available() or skinny_kernels() is None:
        pytest.skip("no Hopper GPU, or python -m rose.kernels.cuda.build has not been run")


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(scale).bfloat16()


def _product(x: Tensor, weight: Tensor, plan: SkinnyPlan) -> Tensor:
    """The product in fp64, summed over parts; checks that all of it and nothing behind it was written."""
    m, n = len(x), len(weight)
    shape = (m, n // 2) if plan.swiglu else (plan.splits, m, n)
    memory = torch.full((math.prod(shape) + GUARD,), math.nan, dtype=torch.bfloat16, device="cuda")
    out = memory[:-GUARD].view(shape)
    (swiglu_gemm if plan.swiglu else split_k_gemm)(x, weight, plan, out)
    assert memory[-GUARD:].isnan().all(), plan
    return out.double() if plan.swiglu else out.double().sum(0)


def _expected(x: Tensor, weight: Tensor, swiglu: bool) -> Tensor:
    product = x.double() @ weight.double().T
    if not swiglu:
        return product
    gate, up = product.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("m", [1, 7, 16, 17, 33, 64, 100, 128, 129, 256])
def test_every_plan_against_fp64(shape: Shape, m: int) -> None:
    x, weight = _random(m, shape.k), _random(shape.n, shape.k, scale=0.05)
    expected = {swiglu: _expected(x, weight, swiglu) for swiglu in (False, True)}
    for plan in skinny_candidates(shape, m):
        reference = expected[plan.swiglu]
        error = (_product(x, weight, plan) - reference).norm() / reference.norm()
        assert error < MAX_RELATIVE_ERROR, plan


def _rounds(m: int) -> Iterator[tuple[Callable[[], None], Tensor]]:
    """An MLP with a residual, 200 times over 4 pairs of weights, each step reading the one before's."""
    hidden, residual = _random(m, 1024), _random(m, 1024)
    norm = RmsNorm(_random(1024), 1e-6)
    weights = [(_random(6144, 1024, scale=0.03), _random(1024, 3072, scale=0.03)) for _ in range(4)]
    wide, gated = torch.empty(2, m, 6144, dtype=torch.bfloat16, device="cuda"), _random(m, 3072)
    parts = torch.empty(8, m, 1024, dtype=torch.bfloat16, device="cuda")
    widen, narrow = SkinnyPlan(2, 2, 1, 6 if m > 64 else 8), SkinnyPlan(8, 1, 2, 6)
    for turn in range(200):
        up, down = weights[turn % 4]
        yield lambda up=up: split_k_gemm(hidden, up, widen, wide), wide
        yield lambda: silu_mul(wide, gated), gated
        yield lambda down=down: split_k_gemm(gated, down, narrow, parts), parts
        yield lambda: add_rms_norm(parts, residual, norm, hidden), hidden


@pytest.mark.parametrize("m", [16, 128])
def test_overlapping_launches_change_no_bit(m: int) -> None:
    """A kernel that read or wrote before its turn would differ from one that has the GPU for itself."""

    def run(wait: bool) -> Tensor:
        torch.manual_seed(0)
        last = torch.empty(0)
        with launching(Early.NO if wait else Early.AT_ONCE):
            for step, written in _rounds(m):
                step()
                last = written
                if wait:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        return last.clone()

    expected = run(wait=True)
    assert expected.isfinite().all()
    for _ in range(5):
        assert torch.equal(run(wait=False), expected)


def test_a_captured_graph_follows_its_inputs() -> None:
    m, plan = 100, SkinnyPlan(2, 1, 2, 8)
    x, weight = _random(m, 1024), _random(4096, 1024, scale=0.05)
    out = torch.empty(2, m, 4096, dtype=torch.bfloat16, device="cuda")
    split_k_gemm(x, weight, plan, out)  # loads the kernel, which must not happen while capturing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            split_k_gemm(x, weight, plan, out)
    for _ in range(20):
        x.copy_(_random(m, 1024))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        reference = _expected(x, weight, swiglu=False)
        assert (out.double().sum(0) - reference).norm() / reference.norm() < MAX_RELATIVE_ERROR
