"""Linear layers without bias; products of few rows come from Triton where that was measured to be faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.kernels.activation import silu_mul
from rose.kernels.gemm import gemm_plan, split_k_gemm, swiglu_gemm, uses_table
from rose.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor


class Projection:
    """x Wᵀ, or the partial sums of it that the kernel after it adds anyway. weight: [N, K]."""

    def __init__(self, weight: Tensor, gated: bool = False) -> None:
        """gated: whether the weight is a gate over an up projection, whose few-row plans are others."""
        self._linear = Linear(weight)
        self._gated = gated
        # None on a CPU, where the plain weight would be a second copy beside the packed one.
        self._weight = weight if uses_table(weight) else None

    def __call__(self, x: Tensor, out: Tensor, partials: Tensor) -> Tensor:
        """[T, N], or partial sums [K, T, N], of x [T, K].

        out: [T, N] and partials (flat): where a GPU may write the result. On a CPU it is a new tensor.
        """
        if self._weight is None:
            return self._linear(x, out if out.is_cuda else None)
        num_tokens, (n, k) = len(x), self._weight.shape
        plan = gemm_plan(num_tokens, n, k, self._gated)
        if plan is None:
            return self._linear(x, out)
        sums = partials[: plan.splits * num_tokens * n].view(plan.splits, num_tokens, n)
        split_k_gemm(x, self._weight, plan, sums)
        return sums


class GatedProjection:
    """silu(x gateᵀ) * (x upᵀ). weight: [2I, K], gate over up, read as one matrix."""

    def __init__(self, weight: Tensor) -> None:
        self._projection = Projection(weight, gated=True)
        self._weight = weight if uses_table(weight) else None

    def __call__(self, x: Tensor, gate_up: Tensor, partials: Tensor, out: Tensor) -> None:
        """Write out [T, I]; gate_up [T, 2I] and partials (flat) are scratch."""
        if self._weight is not None:
            n, k = self._weight.shape
            plan = gemm_plan(len(x), n, k, gated=True)
            if plan is not None and plan.swiglu:
                swiglu_gemm(x, self._weight, plan, out)
                return
        silu_mul(self._projection(x, gate_up, partials), out)
