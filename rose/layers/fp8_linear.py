"""The linear layer whose weight and input are FP8, and where its input lies.

Products have a scale for each row of the input and of the weight. They are cuBLAS's (CUTLASS's before CUDA
12.9), or where that was measured to be faster kernels built ahead of time, which may include SwiGLU.
On a CPU they are computed in fp32 from the same FP8 numbers: right, and slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels.fp8 import E4M3, E4M3_MAX, TINY, Fp8Rows, quantize_rows, silu_mul_fp8
from rose.kernels.fused import FusedGemm, FusedLookup, fused_gemm

if TYPE_CHECKING:
    from torch import Tensor

# Ada and Hopper have FP8 products; Ampere has none.
CAPABILITY = (8, 9)
# Widths of weights must be whole numbers of 16 bytes.
MULTIPLE = 16
# How much larger a product of rounded rows may be: each number by a sixteenth, and the product by bf16's bit.
ROUNDING = (1 + 2.0**-4) * (1 + 2.0**-8)
# CUTLASS's kernel reads the scales of whole tiles. Source: pytorch/pytorch#133334.
_TILE_ROWS = 256


class Fp8Linear:
    """y = x Wᵀ + b. weight: e4m3[N, K] with f32[N, 1]. bias: [N] or None. lookup: of kernels built ahead."""

    def __init__(self, weight: Fp8Rows, bias: Tensor | None = None, lookup: FusedLookup = fused_gemm) -> None:
        self.weight = weight
        self.bias = bias
        self._lookup = lookup

    def __repr__(self) -> str:
        n, k = self.weight.values.shape
        return f"Fp8Linear({k} -> {n})"

    def __call__(self, x: Fp8Rows, out: Tensor) -> Tensor:
        """out [T, N] = the product of x [T, K]; returned. On a GPU `out` is bf16 and nothing is allocated."""
        weight, bias = self.weight, self.bias
        fused = self._lookup("fp8", len(out), *weight.values.shape) if bias is None else None
        if fused is not None:
            fused.fp8(x, weight.values, weight.scale.view(-1), out)
            return out
        if out.is_cuda:
            return torch._scaled_mm(
                x.values,
                weight.values.t(),
                scale_a=x.scale,
                scale_b=weight.scale.t(),
                bias=bias,
                out_dtype=out.dtype,
                use_fast_accum=True,
                out=out,
            )
        total = (x.values.float() @ weight.values.float().t()) * x.scale * weight.scale.t()
        return out.copy_(total if bias is None else total + bias.float())


class Fp8Gated:
    """silu(x gateᵀ) * (x upᵀ). linear: of the weight gate over up, without a bias. lookup: as above."""

    def __init__(self, linear: Fp8Linear, lookup: FusedLookup = fused_gemm) -> None:
        self.linear = linear
        self._columns = linear.weight.scale.view(2, -1).t().flatten()
        self._lookup = lookup
        self.factor = _largest_product(linear.weight) / E4M3_MAX
        pairs = self._columns.view(-1, 2)
        self._direct_columns = (pairs / pairs.new_tensor([1.0, self.factor])).flatten()

    def storing_fp8(self, num_tokens: int) -> FusedGemm | None:
        """The kernel that `direct` needs, where it was measured to be faster."""
        return self._lookup("fp8-swiglu-fp8", num_tokens, *self.linear.weight.values.shape)

    def direct(self, x: Fp8Rows, fused: FusedGemm, out: Fp8Rows) -> Fp8Rows:
        """As a call, with nothing in between: of x whose scales are the rows' lengths over 448.

        out: apart from x; its scales are `factor` times the square of those already. It is returned.
        """
        fused.fp8_swiglu_fp8(x, self.linear.weight.values, self._direct_columns, out.values)
        return out

    def __call__(self, x: Fp8Rows, wide: Tensor, narrow: Tensor, out: Fp8Rows) -> Fp8Rows:
        """Of x [T, K], in `out` [T, I], which is returned and may lie where x does.

        wide: [T, 2I]. narrow: [T, I]. Either holds what comes before.
        """
        weight = self.linear.weight.values
        fused = self._lookup("fp8-swiglu", len(narrow), *weight.shape)
        if fused is None:
            return silu_mul_fp8(self.linear(x, wide), out)
        fused.fp8_swiglu(x, weight, self._columns, narrow)
        return quantize_rows(narrow, out)


def _largest_product(weight: Fp8Rows) -> float:
    """The most that gate · up can be for rows of length 448 that were then rounded. weight: gate over up.

    Source: Cauchy and Schwarz.
    """
    lengths = torch.linalg.vector_norm(weight.float(), dim=1).view(2, -1).prod(0)
    return max(float(lengths.amax()) * (E4M3_MAX * ROUNDING) ** 2, TINY)


class Fp8Scratch:
    """Room for what the next product reads; every product has read it before the next kernel writes there.

    width: of the widest input, in elements.
    """

    def __init__(self, max_tokens: int, width: int, device: torch.device) -> None:
        self.width = width
        self._max_tokens = max_tokens
        self._device = device
        self._memory = None if device.type == "cpu" else self._allocate(max_tokens, width)

    def rows(self, num_tokens: int, width: int) -> Fp8Rows:
        """T rows; what they hold is what was written last.

        Raises:
            ValueError: there are fewer.
        """
        if num_tokens > self._max_tokens:
            raise ValueError(f"batch has {num_tokens} tokens; the scratch holds {self._max_tokens}")
        values, scales = self._memory or self._allocate(num_tokens, width)
        return Fp8Rows(values[: num_tokens * width].view(num_tokens, width), scales[0, :num_tokens])

    def beside(self, memory: Tensor) -> Fp8Rows:
        """Rows of as many numbers as those of `memory` [T, W], in its place; their scales are apart, too."""
        rows, width = memory.shape
        values = memory.view(-1).view(E4M3)[: rows * width].view(rows, width)
        _, scales = self._memory or self._allocate(rows, 0)
        return Fp8Rows(values, scales[1, :rows])

    def _allocate(self, num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
        values = torch.zeros(num_tokens * width, device=self._device, dtype=E4M3)
        return values, torch.zeros(2, num_tokens + _TILE_ROWS, 1, device=self._device)
