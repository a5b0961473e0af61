"""Linear layers over pooled vectors, in fp32: the end of scorers, and Dense modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import layer_norm

from rose.device_batch import Outputs
from rose.kernels.quantize import tanh_int8

if TYPE_CHECKING:
    from torch import Tensor

    from rose.configs.model import Activation
    from rose.kernels.norm import LayerNorm

# Sequences whose vectors the buffers hold, as for `pool_scratch`; a larger batch gets tensors of its own.
_ROWS = 512

# All in place: a forward on a GPU allocates nothing, but for the result of a norm.
_ACTIVATIONS: dict[Activation, Callable[[Tensor], object]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_,
    "silu": torch.ops.aten.silu_,
    "sigmoid": torch.sigmoid_,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """norm(activation(x Wᵀ + b)). weight: f32[out, in]. bias: f32[out] or None. norm: of [out], or None."""

    weight: Tensor
    bias: Tensor | None = None
    activation: Activation = "identity"
    norm: LayerNorm | None = None

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write f32[S, out] of x f32[S, in]."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        _ACTIVATIONS[self.activation](out)
        if self.norm is not None:
            norm = self.norm
            out.copy_(layer_norm(out, norm.weight.shape, norm.weight, norm.bias, norm.eps))


class Stages:
    """One stage after another, between pooling and the outputs: pool into `pooled(outputs)`, then call.

    fp32 whatever the model's dtype: so few rows cost next to nothing, and small differences between scores
    are not rounded away.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """stages: one or more, each as wide as the one before it gives."""
        self._stages = tuple(stages)
        self._inputs = [stage.weight.new_zeros(_ROWS, stage.weight.shape[1]) for stage in stages]

    def pooled(self, outputs: Outputs) -> Outputs:
        """Where pooled vectors f32[S, H] and what tokens give belong. Their int8 is not theirs to give."""
        return Outputs(self._input(0, len(outputs.vectors)), tokens=outputs.tokens)

    def __call__(self, pooled: Outputs, outputs: Outputs) -> None:
        """Write outputs.vectors f32[S, D], and outputs.int8 if it is there, from pooled.vectors f32[S, H]."""
        x, last = pooled.vectors, len(self._stages) - 1
        for index, stage in enumerate(self._stages):
            out = outputs.vectors if index == last else self._input(index + 1, len(x))
            stage(x, out)
            x = out
        if outputs.int8 is not None:
            tanh_int8(outputs.vectors, outputs.int8)

    def _input(self, index: int, count: int) -> Tensor:
        """f32[count, in] for stage `index` to read."""
        buffer = self._inputs[index]
        return buffer[:count] if count <= _ROWS else buffer.new_empty(count, buffer.shape[1])
