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
        """The product of x [T, K]: out [T, N], filled, or the partial sums of it [K, T, N] in partials.

        partials: flat, room for any split-K plan of this weight.
        """
        if self._weight is None:
            return self._linear(x, out)
        num_tokens, (n, k) = len(x), self._weight.shape
        plan = gemm_plan(num_tokens, n, k, self._gated)
        if plan is None:
            return self._linear(x, out)
        if plan.splits == 1:
            split_k_gemm(x, self._weight, plan, out.unsqueeze(0))
            return out
        sums = partials[: plan.splits * num_tokens * n].view(plan.splits, num_tokens, n)
        split_k_gemm(x, self._weight, plan, sums)
        return sums


class GatedProjection:
    """silu(x gateᵀ) * (x upᵀ). weight: [2I, K], gate over up, read as one matrix."""

    def __init__(self, weight: Tensor) -> None:
        self._projection = Projection(weight, gated=True)
        self._inner = len(weight) // 2
        self._weight = weight if uses_table(weight) else None

    def __call__(self, x: Tensor, wide: Tensor, narrow: Tensor, partials: Tensor) -> Tensor:
        """[T, I] of x [T, K], in `narrow`; wide (of 2 T I elements), narrow and partials are flat."""
        num_tokens, inner = len(x), self._inner
        out = narrow[: num_tokens * inner].view(num_tokens, inner)
        if self._weight is not None:
            plan = gemm_plan(num_tokens, 2 * inner, x.shape[1], gated=True)
            if plan is not None and plan.swiglu:
                swiglu_gemm(x, self._weight, plan, out)
                return out
        gate_up = wide[: 2 * num_tokens * inner].view(num_tokens, 2 * inner)
        silu_mul(self._projection(x, gate_up, partials), out)
        return out
