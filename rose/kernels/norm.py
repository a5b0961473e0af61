"""RMSNorm and LayerNorm, with the residual addition that comes before them in one pass.

Sums and statistics are fp32; the residual stream and the results have the dtype of their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """weight: [H]. eps: added to the mean square. Source: Zhang & Sennrich, arXiv 1910.07467."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """weight, bias: [H]. eps: added to the variance. Source: Ba et al., arXiv 1607.06450."""

    weight: Tensor
    bias: Tensor
    eps: float


def rms_norm(x: Tensor, norm: RmsNorm, out: Tensor) -> None:
    """out [T, H] = norm of each row of x [T, H]; `out` may be `x`. All contiguous."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import norm as jit

        jit.rms_norm(x, norm, out)
    else:
        out.copy_(rms_normalized(x.float(), norm))


def add_rms_norm(x: Tensor | None, residual: Tensor, norm: RmsNorm, out: Tensor) -> None:
    """residual += x, then out = norm of it, from the unrounded sum.

    x: [T, H], the partial sums [K, T, H] of a split-K product, added in fp32, or None: they are in residual
    already. residual, out: [T, H].
    """
    if dispatch.uses_triton(residual):
        from rose.kernels.jit import norm as jit

        jit.add_rms_norm(x, residual, norm, out)
    else:
        total = added(x, residual)
        residual.copy_(total)
        out.copy_(rms_normalized(total, norm))


def add_layer_norm(
    x: Tensor | None, residual: Tensor, bias: Tensor | None, norm: LayerNorm, out: Tensor
) -> None:
    """out = LayerNorm(x + bias + residual); `residual` keeps its value unless `out` is the same tensor.

    x: [T, H], partial sums [K, T, H], or None: it is in residual already. bias: [H] of the linear layer that
    made x, or None. out, residual: [T, H].
    """
    if dispatch.uses_triton(residual):
        from rose.kernels.jit import norm as jit

        jit.add_layer_norm(x, residual, bias, norm, out)
    else:
        total = added(x, residual)
        if bias is not None:
            total = total + bias.float()
        out.copy_(layer_normalized(total, norm))


def add_pre_layer_norm(
    x: Tensor, residual: Tensor, bias: Tensor | None, norm: LayerNorm, out: Tensor
) -> None:
    """residual += x + bias, then out = LayerNorm of the unrounded sum; shapes as in `add_layer_norm`."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import norm as jit

        jit.add_pre_layer_norm(x, residual, bias, norm, out)
    else:
        total = added(x, residual)
        if bias is not None:
            total = total + bias.float()
        residual.copy_(total)
        out.copy_(layer_normalized(total, norm))


def added(x: Tensor | None, residual: Tensor) -> Tensor:
    """residual + x, if there is one, or + the sum of partials [K, T, H]: f32[T, H]."""
    if x is None:
        return residual.float()
    return residual.float() + (x.float().sum(0) if x.dim() == 3 else x.float())


def rms_normalized(x: Tensor, norm: RmsNorm) -> Tensor:
    """x [..., H] in fp32 through RMSNorm."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()


def layer_normalized(x: Tensor, norm: LayerNorm) -> Tensor:
    """x [..., H] in fp32 through LayerNorm."""
    weight, bias = norm.weight.float(), norm.bias.float()
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, norm.eps)
