"""What a model multiplies by, met while it is built; and how large its products' inputs become on texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rose.attention.backends import load_backends
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels.fp8 import Fp8Rows
from rose.layers.fp8_linear import Fp8Linear
from rose.layers.fp8_weights import Fp8Weights

if TYPE_CHECKING:
    from torch import Tensor

    from rose.batch import Int32
    from rose.models.registry import Model
    from rose.weights import WeightSource

CPU = torch.device("cpu")


class WatchedLinear(Fp8Linear):
    """Remembers the largest scale of any row that it was given: that scale fits all of them."""

    def __init__(self, weight: Fp8Rows, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.input_scale = 0.0

    def __call__(self, x: Fp8Rows, out: Tensor) -> Tensor:
        """See Fp8Linear."""
        self.input_scale = max(self.input_scale, x.scale.max().item())
        return super().__call__(x, out)


@dataclass(frozen=True, slots=True)
class Product:
    """One weight, which may be a part of what is multiplied by at once. weight: e4m3[N, K] and f32[N, 1]."""

    weight: Fp8Rows
    linear: WatchedLinear


class RecordingWeights(Fp8Weights):
    """Reads on the CPU. products: every weight asked for so far, by the name of its layer.

    progress: called for each.
    """

    def __init__(self, source: WeightSource, max_tokens: int, progress: Callable[[], object]) -> None:
        super().__init__(source, CPU, max_tokens)
        self.products: dict[str, Product] = {}
        self._progress = progress

    def linear(self, heights: Mapping[str, int], width: int, bias: Tensor | None = None) -> WatchedLinear:
        """See Fp8Weights.linear."""
        weight = super().linear(heights, width).weight
        linear = WatchedLinear(weight, bias)
        parts = (torch.split(whole, list(heights.values())) for whole in (weight.values, weight.scale))
        for name, values, scale in zip(heights, *parts, strict=True):
            self.products[name] = Product(Fp8Rows(values, scale), linear)
            self._progress()
        return linear


def run_texts(model: Model, sequences: Iterable[Int32]) -> None:
    """Have a model on the CPU embed each sequence i32[n], for what its layers remember.

    Raises:
        ValueError: one is longer than the model was built for.
    """
    attention = next(iter(load_backends(model.attention_spec).values()))
    for ids in sequences:
        offsets = np.array([0, len(ids)], np.int32)
        attention.plan(offsets)
        batch = DeviceBatch(
            torch.from_numpy(ids), torch.from_numpy(offsets), None, offsets, len(ids), attention
        )
        width = model.config.dimensions if model.config.task != "embed" else model.config.hidden_size
        with torch.inference_mode():
            model.forward(batch, Outputs(torch.zeros(1, width)))
