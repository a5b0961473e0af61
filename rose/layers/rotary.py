"""Encoders with rotation: how they run, and a layer's halves, attention and a gated feed-forward part.

Norms and additions are the models' own: they come before (ModernBERT), after (Nomic BERT) or both (Gemma 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from rose.attention.base import AttentionSpec
from rose.attention.sdpa import SdpaAttention
from rose.kernels.activation import silu_mul
from rose.kernels.early import early_for, launching
from rose.kernels.gated import gelu_mul
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.layers.length_order import run_by_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rose.attention.base import AttentionBackend
    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch, Outputs
    from rose.layers.activations import Activations
    from rose.layers.linear import Linear


def attention_spec(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    """Of the layers that see all of a sequence; the others' differ in their window."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        causal=config.causal,
        dtype=dtype,
        device=device,
    )


def window_attention(spec: AttentionSpec, window: int | None) -> AttentionBackend | None:
    """A backend for layers with a window: torch's, as no other has windows. None: the batch's serves."""
    return None if window is None else SdpaAttention(replace(spec, window=window))


def layer_ropes(config: ModelConfig, device: torch.device) -> list[QkRope]:
    """How each layer rotates q and k, without a norm of theirs: those with a window by their own base."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    windows = config.windows or (None,) * config.num_layers
    thetas = [config.rope_theta if window is None else config.local_rope_theta for window in windows]
    tables = {theta: rope_table(config.head_dim, theta, config.max_positions, device) for theta in {*thetas}}
    return [QkRope(*heads, config.norm_eps, None, tables[theta]) for theta in thetas]


def run_encoder(
    run: Callable[[DeviceBatch, Outputs], None], batch: DeviceBatch, outputs: Outputs, device: torch.device
) -> None:
    """`run` a forward: on a CPU in order of length, on a GPU with kernels brought up early if that helps."""
    if device.type == "cpu":
        run_by_length(batch, outputs, run)
        return
    with launching(early_for(batch.num_tokens, fetches=False, device=device)):
        run(batch, outputs)


@dataclass(frozen=True, slots=True)
class RotaryAttention:
    """qkv: H -> (Hq + 2 Hk) D, three projections as one. output: Hq D -> H. local: see `window_attention`."""

    qkv: Linear
    rope: QkRope
    output: Linear
    local: AttentionBackend | None = None

    def __call__(self, x: Tensor, batch: DeviceBatch, rows: Activations) -> Tensor:
        """[T, H] of x [T, H], which stays as it was; on a GPU in rows.product."""
        packed = self.qkv(x, rows.qkv)
        qk_norm_rope(packed, rows.positions, self.rope, packed)
        rope, backend = self.rope, self.local or batch.attention
        if self.local is not None:
            self.local.plan(batch.host_cu_seqlens)
        heads = packed.view(len(packed), -1, rope.head_dim)
        q, k, v = torch.split(heads, [rope.num_heads, rope.num_kv_heads, rope.num_kv_heads], dim=1)
        context = rows.context.view(len(packed), rope.num_heads, rope.head_dim)
        backend.forward(q, k, v, context, batch.cu_seqlens, batch.max_seqlen)
        return self.output(rows.context, rows.product)


@dataclass(frozen=True, slots=True)
class GatedUnit:
    """act(gate) * up, narrowed. gate_up: H -> 2I, the gate first. narrow: I -> H."""

    gate_up: Linear
    narrow: Linear
    activation: Literal["silu", "gelu", "gelu_tanh"]

    def __call__(self, x: Tensor, rows: Activations) -> Tensor:
        """[T, H] of x [T, H], which stays as it was; on a GPU in rows.product."""
        wide = self.gate_up(x, rows.gate_up)
        if self.activation == "silu":
            silu_mul(wide, rows.gated)
        else:
            gelu_mul(wide, rows.gated, by_tanh=self.activation == "gelu_tanh")
        return self.narrow(rows.gated, rows.product)
