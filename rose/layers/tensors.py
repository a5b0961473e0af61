"""Reads a model's tensors by name, one at a time, into one dtype on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels.norm import LayerNorm
from rose.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from rose.weights import WeightSource


class TensorReader:
    """What wiring reads its layers with."""

    def __init__(self, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._place = (device, dtype)

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor; on a CPU that of a mapped file itself if its dtype is right."""
        return self._weights.tensor(name, shape).to(*self._place)

    def linear(self, name: str, height: int, width: int, bias: bool = False) -> Linear:
        """The layer `name`, width -> height features."""
        return Linear(self(f"{name}.weight", height, width), self(f"{name}.bias", height) if bias else None)

    def stacked(self, heights: dict[str, int], width: int) -> Tensor:
        """Weights [height, width] over each other, each copied straight to its place."""
        device, dtype = self._place
        whole = torch.empty(sum(heights.values()), width, dtype=dtype, device=device)
        for (name, height), part in zip(
            heights.items(), torch.split(whole, list(heights.values())), strict=True
        ):
            part.copy_(self._weights.tensor(f"{name}.weight", (height, width)))
        return whole

    def layer_norm(self, name: str, size: int, eps: float, bias: bool = True) -> LayerNorm:
        """The LayerNorm `name`; one without a bias has zeros."""
        weight = self(f"{name}.weight", size)
        return LayerNorm(weight, self(f"{name}.bias", size) if bias else torch.zeros_like(weight), eps)
