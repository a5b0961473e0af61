"""BERT's layer: attention and a feed-forward part, each followed by an addition and a LayerNorm (post-norm).

Every part takes the tensor to write to; None (on a CPU) lets it make one. On a GPU all of them are given, so
that nothing is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import layer_norm

from rose.kernels.norm import LayerNorm, add_layer_norm
from rose.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.device_batch import DeviceBatch


@dataclass(frozen=True, slots=True)
class EncoderBuffers:
    """Activations of one forward on a GPU, reused by every layer.

    hidden, attended, context, dense: [T, H]. qkv: [T, 3H]. wide: [T, I].
    """

    hidden: Tensor
    attended: Tensor
    context: Tensor
    dense: Tensor
    qkv: Tensor
    wide: Tensor

    @classmethod
    def allocate(
        cls, config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> EncoderBuffers:
        """Buffers for batches of up to `max_tokens` tokens: (7 H + I) elements a token."""
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = (hidden, hidden, hidden, hidden, 3 * hidden, inner)
        return cls(*(torch.empty(max_tokens, width, dtype=dtype, device=device) for width in widths))

    def rows(self, num_tokens: int) -> EncoderBuffers:
        """Views of the first `num_tokens` rows."""
        return EncoderBuffers(*(getattr(self, field.name)[:num_tokens] for field in fields(self)))


class DenseAddNorm:
    """LayerNorm(x Wᵀ + b + residual): one product and one pass. weight: [H, in]; bias: [H]."""

    def __init__(self, weight: Tensor, bias: Tensor, norm: LayerNorm) -> None:
        # The GPU's kernel adds the bias while it normalises; the CPU's product adds bias and residual.
        self._kernel_bias = bias if weight.is_cuda else None
        self._linear = Linear(weight, None if weight.is_cuda else bias)
        self._norm = norm

    def __call__(
        self, x: Tensor, residual: Tensor, buffers: EncoderBuffers | None, out: Tensor | None
    ) -> Tensor:
        """[T, H] from x [T, in] and residual [T, H]; `out` may be neither."""
        norm = self._norm
        if buffers is None or out is None:
            return layer_norm(
                self._linear.add(x, residual), norm.weight.shape, norm.weight, norm.bias, norm.eps
            )
        add_layer_norm(self._linear(x, buffers.dense), residual, self._kernel_bias, norm, out)
        return out


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer. qkv: H -> 3H, three projections as one. widen: H -> I. num_heads * head_dim = H."""

    qkv: Linear
    attention_output: DenseAddNorm
    widen: Linear
    output: DenseAddNorm
    num_heads: int
    head_dim: int

    def __call__(self, hidden: Tensor, batch: DeviceBatch, buffers: EncoderBuffers | None) -> Tensor:
        """[T, H] -> [T, H]; on a GPU both are buffers.hidden."""
        context = self._attend(hidden, batch, buffers)
        attended = self.attention_output(context, hidden, buffers, buffers and buffers.attended)
        wide = self.widen.gelu(attended, buffers and buffers.wide)
        return self.output(wide, attended, buffers, buffers and buffers.hidden)

    def _attend(self, hidden: Tensor, batch: DeviceBatch, buffers: EncoderBuffers | None) -> Tensor:
        """Softmax attention within each sequence: [T, H] -> [T, H]."""
        qkv = self.qkv(hidden, buffers and buffers.qkv)
        context = torch.empty_like(hidden) if buffers is None else buffers.context
        heads = (self.num_heads, self.head_dim)
        q, k, v = qkv.unflatten(1, (3, *heads)).unbind(1)
        batch.attention.forward(q, k, v, context.unflatten(1, heads), batch.cu_seqlens, batch.max_seqlen)
        return context
