"""LayerNorm of rows that was left to the next product: a factor and a summand a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """values [T, H] whose LayerNorm, but for weight and bias, is scale f32[T] * values + offset f32[T]."""

    values: Tensor
    scale: Tensor
    offset: Tensor


def row_norm(sums: Tensor, width: int, eps: float, scale: Tensor, offset: Tensor) -> None:
    """scale f32[T] = 1 / sqrt(variance + eps), offset f32[T] = -mean * scale, of rows of `width` elements.

    sums: f32[2, T, parts], which added up are the sums of each row's elements, and of their squares.
    """
    if dispatch.uses_triton(sums):
        from rose.kernels.jit import row_norm as jit

        jit.row_norm(sums, width, eps, scale, offset)
        return
    mean, square = sums.sum(2) / width
    # Where all elements of a row are alike, rounding may leave less than nothing, whose root would be NaN.
    scale.copy_(torch.rsqrt((square - mean * mean).clamp_min(0.0) + eps))
    offset.copy_(-mean * scale)
