"""The linear layer: oneDNN with prepacked weights on a CPU, cuBLAS into a given tensor on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from rose.kernels.activation import bias_gelu

if TYPE_CHECKING:
    from torch import Tensor

# The row count that oneDNN picks the packed layout for. Measured on AVX-512: every count from 16 up gives the
# same layout, right for all batches; 1 gives one that is up to 2x slower at 3 rows and more.
_PACK_ROWS = 64

# Of more rows cuBLAS 13's choice for 1024 columns clears memory before each product. Such a node keeps graphs
# from the driver's fast launch: 25x512 of BGE-M3 takes the host 175 us with them and 13 without. The largest
# batches hide that, and are as fast or faster whole.
_MOST_ROWS, _WHOLE_ROWS, _PART_WIDTH = 8192, 32768, 1024

_prepacked: WeakSet[Linear] = WeakSet()  # all there are, so that `compile_products` finds one of each kind


class Linear:
    """y = x Wᵀ + b, and the same with what usually follows it.

    weight: [out_features, in_features]. bias: [out_features] or None. Both stay on their device.
    On a CPU the weight is repacked once (and the plain copy dropped): 1.1x as fast as F.linear at 256 rows,
    1.5x to 2x at 8, and GELU and residual additions ride along for free.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = _prepack(weight)
        # What oneDNN's code depends on besides rows and what rides along, and what has ridden along.
        self._kind = (self.in_features, self.out_features, bias is None, weight.dtype)
        self._posts: set[str] = set()
        if self._packed is not None:
            _prepacked.add(self)
        self._weight = weight.t() if self._packed is None else None

    def __repr__(self) -> str:
        kind = "plain" if self._packed is None else "prepacked"
        return f"Linear({self.in_features} -> {self.out_features}, {kind})"

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, out_features] = x [T, in_features] Wᵀ + b; if `out` is given, written there and returned."""
        if self._weight is None:
            return _into(out, self._fused(x, "none"))
        if self._bias is None:
            return torch.mm(x, self._weight, out=out)
        return torch.addmm(self._bias, x, self._weight, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> bool:
        """residual [T, out_features] += x Wᵀ in one product; False, and nothing, if that cannot be."""
        if self._weight is None or self._bias is not None:
            return False
        rows = _rows_a_part(len(x), self.out_features)
        for at in range(0, len(x), rows):
            residual[at : at + rows].addmm_(x[at : at + rows], self._weight)
        return True

    def gelu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, out_features] = gelu(x Wᵀ + b), the exact form with erf."""
        if self._weight is None:
            return _into(out, self._fused(x, "gelu"))
        out = torch.mm(x, self._weight, out=out)
        bias_gelu(out, self._bias, out)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """[T, out_features] = x Wᵀ + b + residual [T, out_features], a new tensor."""
        if self._packed is None:
            return self(x).add_(residual)
        packed, bias = self._packed, self._bias
        self._posts.add("add")
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
        return total

    def _fused(self, x: Tensor, post: str) -> Tensor:
        self._posts.add(post)
        algorithm = "none" if post == "gelu" else ""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, post, [], algorithm)
        return y


def compile_products(num_rows: int) -> None:
    """Have oneDNN compile, for so many rows, each kind of product that has run for any number of them."""
    kinds = {(post, linear._kind): linear for linear in list(_prepacked) for post in linear._posts}
    for (post, (in_features, out_features, _, dtype)), linear in kinds.items():
        x = torch.zeros(num_rows, in_features, dtype=dtype)
        if post == "add":
            linear.add(x, torch.zeros(num_rows, out_features, dtype=dtype))
        else:
            linear._fused(x, post)


def _prepack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout, or None where oneDNN cannot take it.

    Source: what torch's inductor does to frozen linear layers on a CPU (torch/_inductor/mkldnn_lowerings.py).
    """
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not available:
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def _rows_a_part(num_rows: int, width: int) -> int:
    """Rows of all parts but the last. Equal parts were slower: see docs/benchmarks/log.md."""
    in_parts = width <= _PART_WIDTH and _MOST_ROWS < num_rows <= _WHOLE_ROWS
    return _MOST_ROWS if in_parts else max(num_rows, 1)


def _into(out: Tensor | None, y: Tensor) -> Tensor:
    return y if out is None else out.copy_(y)
