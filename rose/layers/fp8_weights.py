"""Reads the weights of a model's products in FP8: as they are stored, or quantised here, a scale a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from rose.errors import ModelLoadError
from rose.kernels.fp8 import E4M3, Fp8Rows, quantized
from rose.layers.fp8_linear import MULTIPLE, Fp8Linear, Fp8Scratch

if TYPE_CHECKING:
    from torch import Tensor

    from rose.weights import Shape, WeightSource


# Whose layers have a form with FP8 products, by ModelConfig.architecture.
FP8_ARCHITECTURES = frozenset({"qwen3", "qwen2", "llama", "bert"})


class DequantizedWeights:
    """A source whose FP8 tensors come as the numbers that they stand for, f32; others as they are."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """See WeightSource.tensor."""
        tensor = self._source.tensor(name, shape)
        if tensor.dtype is not E4M3:
            return tensor
        return Fp8Rows(tensor, stored_scale(self._source, name, shape[0])).float()


class Fp8Weights:
    """What layers with FP8 products are read from: their weights by `linear`, all else by `tensor`.

    max_tokens: the most of one batch, for the scratch.
    """

    def __init__(self, source: WeightSource, device: torch.device, max_tokens: int) -> None:
        self._source = source
        self._plain = DequantizedWeights(source)
        self._device = device
        self._max_tokens = max_tokens
        self._scratch: Fp8Scratch | None = None

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """See WeightSource.tensor; what is stored in FP8 comes as the numbers that it stands for."""
        return self._plain.tensor(name, shape)

    def linear(self, heights: Mapping[str, int], width: int, bias: Tensor | None = None) -> Fp8Linear:
        """Layers by name, each width -> height features, over each other as one.

        Raises:
            ModelLoadError: a tensor is missing, or FP8 products cannot have its shape.
        """
        odd = next((size for size in (width, *heights.values()) if size % MULTIPLE), None)
        if odd is not None:
            name = next(iter(heights))
            raise ModelLoadError(
                f"--dtype fp8: {name} has a width of {odd}, which is no multiple of {MULTIPLE}"
            )
        weight = Fp8Rows.empty(sum(heights.values()), width, self._device)
        start = 0
        for name, height in heights.items():
            rows = slice(start, start := start + height)
            self._read(f"{name}.weight", Fp8Rows(weight.values[rows], weight.scale[rows]))
        return Fp8Linear(weight, bias)

    def scratch(self, width: int) -> Fp8Scratch:
        """Room for the inputs of products, the widest of `width` elements: one for all layers.

        Raises:
            ValueError: it was made for less.
        """
        if self._scratch is None:
            self._scratch = Fp8Scratch(self._max_tokens, width, self._device)
        if width > self._scratch.width:
            raise ValueError(f"the layers before this one share a scratch of {self._scratch.width} elements")
        return self._scratch

    def _read(self, name: str, out: Fp8Rows) -> None:
        shape = tuple(out.values.shape)
        tensor = self._source.tensor(name, shape)
        if tensor.dtype is E4M3:
            out.values.copy_(tensor)
            out.scale.copy_(stored_scale(self._source, name, shape[0]))
        else:
            quantized(tensor.to(self._device).float(), out)


def stored_scale(source: WeightSource, name: str, rows: int) -> Tensor:
    """f32[rows, 1] of the FP8 tensor X.weight: X.weight_scale.

    Raises:
        ModelLoadError: it is missing, or has another shape.
    """
    return source.tensor(f"{name}_scale", (rows, 1)).float()
