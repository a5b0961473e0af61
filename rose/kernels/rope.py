"""Rotary positions on the packed QKV product, after Qwen2's bias or Qwen3's per-head RMSNorm of q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.configs.rope import YarnScaling
from rose.kernels import dispatch
from rose.kernels.fp8 import E4M3_MAX
from rose.kernels.frequencies import frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from rose.configs.rope import RopeScaling


@dataclass(frozen=True, slots=True)
class QkRope:
    """How a row of qkv [T, (Hq + 2 Hk) D] is laid out, normed and rotated.

    weight: [2, D], the norm's weights for queries, then for keys; None: no norm.
    cos_sin: f32[P, D] from `rope_table`.
    bias: [(Hq + 2 Hk) D], added before all else; None: none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    weight: Tensor | None
    cos_sin: Tensor
    bias: Tensor | None = None

    @property
    def rotated_heads(self) -> int:
        """Query and key heads; the value heads follow and stay as they are."""
        return self.num_heads + self.num_kv_heads


def rope_table(
    head_dim: int,
    theta: float,
    num_positions: int,
    device: torch.device | str,
    scaling: RopeScaling | None = None,
) -> Tensor:
    """f32[P, D]: cos of the D/2 angles of each position, then their sin. Angles are computed in f64.

    Both carry YaRN's attention factor, so that whatever rotates by this table honours it.
    fp32 rather than bf16: bf16 would cost as much accuracy as rounding q and k once more, and the table is
    read from L2 (512 bytes a token beside 12 KB of q and k).
    Source: Su et al., arXiv 2104.09864; rotate-half as in GPT-NeoX.
    """
    inverse = frequencies(head_dim, theta, scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), inverse)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    if isinstance(scaling, YarnScaling):
        table *= scaling.attention_factor
    return table.float().to(device)


def qk_norm_rope(
    source: Tensor, positions: Tensor, rope: QkRope, qkv: Tensor, scales: Tensor | None = None
) -> None:
    """Write q and k, normed and rotated, and v, untouched but for the bias, to qkv [T, (Hq + 2 Hk) D].

    source: `qkv` itself (in place), or split-K partial sums [K, T, (Hq + 2 Hk) D] of it. positions: i32[T].
    scales: f32[Hq + 2 Hk]; with them qkv is e4m3, what its numbers stand for is that times the scale of their
    head, and what does not fit becomes the largest that does; source is then a product of the same shape.
    """
    if dispatch.uses_triton(qkv):
        from rose.kernels.jit import rope as jit

        jit.qk_norm_rope(source, positions, rope, qkv, scales)
        return
    total = source.float().sum(0) if source.dim() == 3 else source.float()
    if rope.bias is not None:
        total = total + rope.bias.float()
    values_at = rope.rotated_heads * rope.head_dim
    rows = total[:, :values_at].view(len(qkv), -1, rope.head_dim)
    turned = rotated(normed(rows, rope), positions, rope)
    if scales is not None:
        values = total[:, values_at:].view(len(qkv), -1, rope.head_dim)
        heads = torch.cat([turned, values], dim=1) / scales[:, None]
        qkv.copy_(heads.clamp(-E4M3_MAX, E4M3_MAX).flatten(1))
        return
    if source is not qkv or rope.bias is not None:
        qkv[:, values_at:] = total[:, values_at:]
    qkv[:, :values_at] = turned.flatten(1)


def normed(rows: Tensor, rope: QkRope) -> Tensor:
    """q and k f32[T, Hq + Hk, D] through their RMSNorm, if there is one."""
    if rope.weight is None:
        return rows
    query, key = rope.weight.float()
    weight = torch.cat([query.expand(rope.num_heads, -1), key.expand(rope.num_kv_heads, -1)])
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + rope.eps) * weight


def rotated(rows: Tensor, positions: Tensor, rope: QkRope) -> Tensor:
    """q and k f32[T, Hq + Hk, D], each head turned by its token's position, i32[T]."""
    first, second = rows.chunk(2, dim=-1)
    cos, sin = rope.cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
