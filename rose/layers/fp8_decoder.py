"""The decoder's layer with FP8 products; attention, norms and the residual stream are as in the plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.attention.base import Fp8Attention
from rose.kernels.fp8 import ScaledSquare, add_rms_norm_by_length, add_rms_norm_fp8, quantize_rows
from rose.kernels.rope import qk_norm_rope
from rose.layers.decoder import DecoderReader, ProductNames, attend, pick
from rose.layers.fp8_heads import head_scales
from rose.layers.fp8_linear import Fp8Gated

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch
    from rose.kernels.fp8 import Fp8Rows
    from rose.kernels.norm import RmsNorm
    from rose.kernels.one_query import OneQuery
    from rose.kernels.rope import QkRope
    from rose.layers.fp8_linear import Fp8Linear, Fp8Scratch
    from rose.layers.fp8_weights import Fp8Weights
    from rose.layers.workspace import DecoderBuffers


@dataclass(frozen=True, slots=True)
class Fp8DecoderLayer:
    """DecoderLayer with FP8 products. On a GPU one kernel more than there quantises the attention's result.

    scratch: where products' inputs lie, and q, k and v for attention in FP8, shared by all layers.
    head_scales: f32[Hq + 2 Hk] of those; None: attention is never in FP8.
    """

    input_norm: RmsNorm
    qkv: Fp8Linear
    rope: QkRope
    output: Fp8Linear
    mlp_norm: RmsNorm
    gate_up: Fp8Gated
    down: Fp8Linear
    scratch: Fp8Scratch
    head_scales: Tensor | None = None

    def project(self, rows: DecoderBuffers) -> Tensor:
        """See DecoderLayer.project."""
        return self.qkv(self._quantized(rows.hidden), rows.qkv)

    def follow(self, mixed: Tensor | None, rows: DecoderBuffers) -> Tensor:
        """See DecoderLayer.follow."""
        assert mixed is not None  # no product in FP8 adds to the residual stream by itself
        return self.qkv(self._normed(mixed, self.input_norm, rows), rows.qkv)

    def attend(self, batch: DeviceBatch, buffers: DecoderBuffers, product: Tensor | None) -> None:
        """See DecoderLayer.attend."""
        attention, rope, scales = batch.attention, self.rope, self.head_scales
        if product is None or scales is None or not isinstance(attention, Fp8Attention):
            attend(rope, batch, buffers, product)
            return
        packed = self.scratch.rows(*product.shape).values
        qk_norm_rope(product, buffers.positions, rope, packed, scales)
        heads, context = (x.view(len(x), -1, rope.head_dim) for x in (packed, buffers.context))
        attention.forward_fp8(heads, scales, context, batch.cu_seqlens)

    def pick(
        self, batch: DeviceBatch, buffers: DecoderBuffers, product: Tensor | None, query: OneQuery
    ) -> DecoderBuffers:
        """See DecoderLayer.pick; heads are never in e4m3 there."""
        return pick(self.rope, batch, buffers, product, query)

    def mix(self, rows: DecoderBuffers) -> Tensor:
        """See DecoderLayer.mix."""
        mixed = self.output(self._quantized(rows.context), rows.hidden)
        return self.down(self._gated(mixed, rows), rows.hidden)

    def _gated(self, mixed: Tensor, rows: DecoderBuffers) -> Fp8Rows:
        """SwiGLU of the residual stream's norm, to which `mixed` is added first."""
        gate_up, fused = self.gate_up, self.gate_up.storing_fp8(len(mixed))
        if fused is None:
            normed = self._normed(mixed, self.mlp_norm, rows)
            return gate_up(normed, rows.wide, rows.narrow, self.scratch.rows(*rows.narrow.shape))
        normed, out = self.scratch.rows(*mixed.shape), self.scratch.beside(rows.narrow)
        square = ScaledSquare(out.scale, gate_up.factor)
        add_rms_norm_by_length(mixed, rows.residual, self.mlp_norm, normed, square)
        return gate_up.direct(normed, fused, out)

    def _quantized(self, x: Tensor) -> Fp8Rows:
        return quantize_rows(x, self.scratch.rows(*x.shape))

    def _normed(self, mixed: Tensor, norm: RmsNorm, rows: DecoderBuffers) -> Fp8Rows:
        """The norm of the residual stream, to which `mixed` is added."""
        return add_rms_norm_fp8(mixed, rows.residual, norm, self.scratch.rows(*mixed.shape))


def read_layer(
    read: DecoderReader, weights: Fp8Weights, config: ModelConfig, index: int, cos_sin: Tensor
) -> Fp8DecoderLayer:
    """As DecoderReader.layer; `read` gives what is no weight of a product."""
    name, names = f"layers.{index}", ProductNames.of(config, index)
    size, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    norm, qkv = read.norm(f"{name}.input_layernorm.weight"), weights.linear(names.qkv, size)
    rope = read.rope(index, cos_sin)
    return Fp8DecoderLayer(
        input_norm=norm,
        qkv=qkv,
        rope=rope,
        output=weights.linear({names.output: size}, query),
        mlp_norm=read.norm(f"{name}.post_attention_layernorm.weight"),
        gate_up=Fp8Gated(weights.linear(names.gate_up, size)),
        down=weights.linear({names.down: size}, inner),
        scratch=weights.scratch(max(size, inner, sum(names.qkv.values()))),
        head_scales=head_scales(norm, qkv.weight, rope),
    )
