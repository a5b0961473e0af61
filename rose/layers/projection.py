"""Linear layers whose products of few rows come from our own kernels where that was measured to be faster.

A Projection leaves partial sums to the kernel that follows; the other two end by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rose.kernels.activation import add_bias, bias_gelu, silu_mul
from rose.kernels.fused import FusedLookup, fused_gemm
from rose.kernels.gemm import GemmPlan, bias_gemm, gemm_plan, split_k_gemm, swiglu_gemm, uses_table
from rose.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.plan import SkinnyPlan
    from rose.kernels.gemm import Ending


class Projection:
    """x Wᵀ, or the partial sums of it that the kernel after it adds anyway.

    weight: [N, K], kept where our own kernels may take it; else None.
    """

    def __init__(self, weight: Tensor, ending: Ending = "sum", lookup: FusedLookup = fused_gemm) -> None:
        """ending: what follows; plans depend on it. lookup: of kernels for many rows."""
        self._linear = Linear(weight)
        self._lookup = lookup
        self._ending = ending
        # None on a CPU, where the plain weight would be a second copy beside the packed one.
        self.weight = weight if uses_table(weight) else None

    def __call__(self, x: Tensor, out: Tensor, partials: Tensor) -> Tensor:
        """The product of x [T, K]: out [T, N], filled, or the partial sums of it [K, T, N] in partials.

        partials: flat, room for any split-K plan of this weight.
        """
        ours = self._by_ours(x, out, partials)
        return self._linear(x, out) if ours is None else ours

    def add(self, x: Tensor, residual: Tensor, out: Tensor, partials: Tensor) -> Tensor | None:
        """residual [T, N] += x Wᵀ, and None; or what is still to be added to it, as of a call.

        The first where the product is cuBLAS's, which reads and writes the residual on its way: a kernel that
        adds two tensors and stores their sum moves one and a half times as much as both do then.
        """
        ours = self._by_ours(x, out, partials)
        if ours is None and self._linear.add_to(residual, x):
            return None
        return self._linear(x, out) if ours is None else ours

    def _by_ours(self, x: Tensor, out: Tensor, partials: Tensor) -> Tensor | None:
        """As a call, where a kernel of ours makes the product; None, and nothing done, elsewhere."""
        if self.weight is None:
            return None
        fused = self._lookup("plain", len(x), *self.weight.shape)
        if fused is not None:
            fused.plain(x, self.weight, out)
            return out
        plan = _plan(x, self.weight, self._ending)
        return None if plan is None else _unfused(x, self.weight, plan, out, partials)


class BiasedProjection:
    """x Wᵀ + b, or gelu of it.

    weight: [N, K], kept as by Projection. bias: [N]. lookup: of kernels for many rows.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor, gelu: bool = False, lookup: FusedLookup = fused_gemm
    ) -> None:
        self._linear = Linear(weight, bias)
        self._ending: Literal["bias", "gelu"] = "gelu" if gelu else "bias"
        self.bias = bias
        self.weight = weight if uses_table(weight) else None
        self._lookup = lookup

    def __call__(self, x: Tensor, out: Tensor | None, partials: Tensor | None) -> Tensor:
        """[T, N] of x [T, K], in `out`. partials: as for Projection. On a CPU both may be None."""
        if self.weight is not None and out is not None and partials is not None:
            fused = self._lookup(self._ending, len(x), *self.weight.shape)
            if fused is not None:
                finish = fused.gelu if self._ending == "gelu" else fused.bias
                finish(x, self.weight, self.bias, out)
                return out
            plan = _plan(x, self.weight, self._ending)
            if plan is not None:
                self._follow(plan, self.weight, x, out, partials)
                return out
        return self._linear.gelu(x, out) if self._ending == "gelu" else self._linear(x, out)

    def _follow(
        self, plan: GemmPlan | SkinnyPlan, weight: Tensor, x: Tensor, out: Tensor, partials: Tensor
    ) -> None:
        if isinstance(plan, GemmPlan) and plan.fused == self._ending:
            bias_gemm(x, weight, self.bias, plan, out)
            return
        finish = bias_gelu if self._ending == "gelu" else add_bias
        finish(_unfused(x, weight, plan, out, partials), self.bias, out)


class GatedProjection:
    """silu(x gateᵀ) * (x upᵀ). weight: [2I, K], gate over up; kept as by Projection. lookup: as above."""

    def __init__(self, weight: Tensor, lookup: FusedLookup = fused_gemm) -> None:
        self._projection = Projection(weight, "swiglu", lookup)
        self.weight = weight if uses_table(weight) else None
        self._lookup = lookup

    def __call__(self, x: Tensor, wide: Tensor, narrow: Tensor, partials: Tensor) -> Tensor:
        """[T, I] of x [T, K], in narrow [T, I]. wide: [T, 2I], gate and up. partials: as for Projection."""
        if self.weight is not None:
            fused = self._lookup("swiglu", len(x), *self.weight.shape)
            if fused is not None:
                fused.swiglu(x, self.weight, narrow)
                return narrow
            plan = _plan(x, self.weight, "swiglu")
            if plan is not None and plan.swiglu:
                swiglu_gemm(x, self.weight, plan, narrow)
                return narrow
        silu_mul(self._projection(x, wide, partials), narrow)
        return narrow


def _plan(x: Tensor, weight: Tensor, ending: Ending) -> GemmPlan | SkinnyPlan | None:
    n, k = weight.shape
    return gemm_plan(len(x), n, k, ending)


def _unfused(x: Tensor, weight: Tensor, plan: GemmPlan | SkinnyPlan, out: Tensor, partials: Tensor) -> Tensor:
    """out [T, N], or partial sums [K, T, N] in partials, as the plan has it."""
    if plan.splits == 1:
        split_k_gemm(x, weight, plan, out.unsqueeze(0))
        return out
    num_tokens, n = out.shape
    sums = partials[: plan.splits * num_tokens * n].view(plan.splits, num_tokens, n)
    split_k_gemm(x, weight, plan, sums)
    return sums
