"""How large q, k and v can get, by the weights alone: scales for attention in FP8 that no batch can exceed.

A scale that is fixed costs no look at the data, and so no pass over it. It is loose: what a head really holds
is some 2⁴ below the bound. That costs nothing, for e4m3 has its three bits of fraction over 2¹⁴.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rose.kernels.fp8 import E4M3_MAX, TINY
from rose.layers.fp8_linear import ROUNDING

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.fp8 import Fp8Rows
    from rose.kernels.norm import RmsNorm
    from rose.kernels.rope import QkRope


def head_scales(norm: RmsNorm, qkv: Fp8Rows, rope: QkRope) -> Tensor | None:
    """f32[Hq + 2 Hk]: the bounds of each head's numbers over e4m3's largest one.

    norm: of the rows that `qkv`, the weight, is multiplied with. rope: what then happens to q and k; if that
    is no norm there are no scales.
    """
    if rope.weight is None:
        return None
    bounds = torch.cat([_rotated_bounds(rope.weight, rope), _value_bounds(norm, qkv, rope)])
    return (bounds / E4M3_MAX).clamp(min=TINY)


def _rotated_bounds(weight: Tensor, rope: QkRope) -> Tensor:
    """f32[Hq + Hk]: a normed head has length √D at most, times the weight, times what the table stretches."""
    cos, sin = rope.cos_sin.chunk(2, dim=1)
    stretch = (cos.square() + sin.square()).amax().sqrt()
    largest = weight.float().abs().amax(1) * stretch * math.sqrt(rope.head_dim)
    counts = torch.tensor([rope.num_heads, rope.num_kv_heads], device=largest.device)
    return largest.repeat_interleave(counts)


def _value_bounds(norm: RmsNorm, qkv: Fp8Rows, rope: QkRope) -> Tensor:
    """f32[Hk]: a normed row has length √H at most before the norm's weight. Source: Cauchy and Schwarz."""
    rows = qkv.float()[rope.rotated_heads * rope.head_dim :]
    lengths = torch.linalg.vector_norm(rows * norm.weight.float(), dim=1) * math.sqrt(rows.shape[1])
    bounds = lengths * ROUNDING
    if rope.bias is not None:
        bounds = bounds + rope.bias[-len(rows) :].float().abs()
    heads: Tensor = bounds.view(rope.num_kv_heads, -1)
    return heads.amax(1)
