"""BERT's layer with FP8 products; attention, norms and what is added are as in the plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels.fp8 import Fp8Rows, NormedRows, add_layer_norm_fp8, bias_gelu_fp8, quantize_rows
from rose.kernels.norm import LayerNorm, add_layer_norm
from rose.layers.encoder import ProductNames, attend, pick

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch
    from rose.kernels.one_query import OneQuery
    from rose.layers.encoder import EncoderBuffers, EncoderReader
    from rose.layers.fp8_linear import Fp8Linear, Fp8Scratch
    from rose.layers.fp8_weights import Fp8Weights


@dataclass(frozen=True, slots=True)
class Fp8EncoderLayer:
    """EncoderLayer with FP8 products. QKV's bias is added by its product, others by the kernel that follows.

    scratch: where each product's input lies, shared by all layers.
    """

    qkv: Fp8Linear
    attention_output: Fp8Linear
    attention_bias: Tensor
    attention_norm: LayerNorm
    widen: Fp8Linear
    widen_bias: Tensor
    output: Fp8Linear
    output_bias: Tensor
    output_norm: LayerNorm
    heads: tuple[int, int]
    scratch: Fp8Scratch

    def attend(self, hidden: Tensor, batch: DeviceBatch, buffers: EncoderBuffers) -> Tensor:
        """See EncoderLayer.attend."""
        return attend(self._project(hidden, buffers), self.heads, batch, buffers)

    def pick(
        self, hidden: Tensor, batch: DeviceBatch, buffers: EncoderBuffers, query: OneQuery
    ) -> tuple[Tensor, Tensor, EncoderBuffers]:
        """See EncoderLayer.pick."""
        return pick((self._project(hidden, buffers), hidden), self.heads, batch, buffers, query)

    def mix(self, context: Tensor, hidden: Tensor, buffers: EncoderBuffers) -> Tensor:
        """See EncoderLayer.mix."""
        size, inner = hidden.shape[1], len(self.widen_bias)
        dense = _room(buffers.dense, hidden, size)
        product = self.attention_output(self._quantized(context), dense)
        attended = NormedRows(_room(buffers.attended, hidden, size), self.scratch.rows(*hidden.shape))
        add_layer_norm_fp8(product, hidden, self.attention_bias, self.attention_norm, attended)
        wide = self.widen(attended.fp8, _room(buffers.wide, hidden, inner))
        gelu = bias_gelu_fp8(wide, self.widen_bias, self.scratch.rows(*wide.shape))
        out = _room(buffers.hidden, hidden, size)
        add_layer_norm(self.output(gelu, dense), attended.rows, self.output_bias, self.output_norm, out)
        return out

    def _project(self, hidden: Tensor, buffers: EncoderBuffers) -> Tensor:
        """qkv [T, 3H] of hidden [T, H]."""
        return self.qkv(self._quantized(hidden), _room(buffers.qkv, hidden, 3 * hidden.shape[1]))

    def _quantized(self, x: Tensor) -> Fp8Rows:
        return quantize_rows(x, self.scratch.rows(*x.shape))


def read_layer(read: EncoderReader, weights: Fp8Weights, config: ModelConfig, index: int) -> Fp8EncoderLayer:
    """As EncoderReader.layer; `read` gives what is no weight of a product."""
    names = ProductNames.of(index)
    size, inner = config.hidden_size, config.intermediate_size
    return Fp8EncoderLayer(
        qkv=weights.linear(
            dict.fromkeys(names.qkv, size), size, torch.cat([read.bias(name, size) for name in names.qkv])
        ),
        attention_output=weights.linear({names.attention_output: size}, size),
        attention_bias=read.bias(names.attention_output, size),
        attention_norm=read.norm(names.attention_norm),
        widen=weights.linear({names.widen: inner}, size),
        widen_bias=read.bias(names.widen, inner),
        output=weights.linear({names.output: size}, inner),
        output_bias=read.bias(names.output, size),
        output_norm=read.norm(names.output_norm),
        heads=(config.num_heads, config.head_dim),
        scratch=weights.scratch(max(size, inner)),
    )


def _room(buffer: Tensor | None, like: Tensor, width: int) -> Tensor:
    """[T, width]: the buffer of that width, or on a CPU a new one for T rows as in `like`."""
    return like.new_empty(len(like), width) if buffer is None else buffer
