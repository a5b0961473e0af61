"""Rows of activations in FP8 (e4m3) with a scale each, made by the kernel that has them in registers anyway.

A row's scale is its largest magnitude over 448, e4m3's largest number, so that a row uses all of the range.
A row with a NaN or an infinity comes out of any product as NaN in all columns: nothing is hidden.
Source: Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch
from rose.kernels.norm import added, layer_normalized, rms_normalized

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.norm import LayerNorm, RmsNorm

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# What a row's largest magnitude counts as at least: a row of zeros has a scale, and that has an inverse.
TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """values e4m3[T, K] times scale f32[T, 1] is what the rows stand for. Both contiguous."""

    values: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device | str) -> Fp8Rows:
        """Room for so many rows."""
        values = torch.empty(rows, width, dtype=E4M3, device=device)
        return cls(values, torch.empty(rows, 1, device=device))

    def float(self) -> Tensor:
        """f32[T, K]."""
        return self.values.float() * self.scale


def quantize_rows(x: Tensor, out: Fp8Rows) -> Fp8Rows:
    """x [T, K] to `out`, which is returned."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import fp8 as jit

        jit.quantize_rows(x, out)
        return out
    return quantized(x.float(), out)


def add_rms_norm_fp8(x: Tensor, residual: Tensor, norm: RmsNorm, out: Fp8Rows) -> Fp8Rows:
    """residual [T, H] += x [T, H]; its norm, from the unrounded sum, goes to `out`, which is returned."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import fp8 as jit

        jit.add_rms_norm_fp8(x, residual, norm, out)
        return out
    total = added(x, residual)
    residual.copy_(total)
    return quantized(rms_normalized(total, norm), out)


def add_rms_norm_by_length(
    x: Tensor, residual: Tensor, norm: RmsNorm, out: Fp8Rows, square: ScaledSquare
) -> None:
    """As add_rms_norm_fp8, but a row's scale is its length over 448, not its largest magnitude.

    So the product of its numbers with a column is 448 times the length of that at most, but for rounding.
    square: where a multiple of scale² goes.
    """
    if dispatch.uses_triton(x):
        from rose.kernels.jit import fp8 as jit

        jit.add_rms_norm_by_length(x, residual, norm, out, square)
        return
    total = added(x, residual)
    residual.copy_(total)
    normed = rms_normalized(total, norm)
    scaled(normed, torch.linalg.vector_norm(normed, dim=1, keepdim=True), out)
    square.values.copy_(out.scale.square() * square.factor)


@dataclass(frozen=True, slots=True)
class ScaledSquare:
    """values f32[T, 1] = factor * scale² of each row."""

    values: Tensor
    factor: float


@dataclass(frozen=True, slots=True)
class NormedRows:
    """What LayerNorm gives: the residual stream [T, H], and the same rows for the next product."""

    rows: Tensor
    fp8: Fp8Rows


def add_layer_norm_fp8(x: Tensor, residual: Tensor, bias: Tensor, norm: LayerNorm, out: NormedRows) -> None:
    """out = LayerNorm(x + bias + residual), all [T, H] but bias [H]."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import fp8 as jit

        jit.add_layer_norm_fp8(x, residual, bias, norm, out)
        return
    normed = layer_normalized(added(x, residual) + bias.float(), norm)
    out.rows.copy_(normed)
    quantized(normed, out.fp8)


def silu_mul_fp8(gate_up: Tensor, out: Fp8Rows) -> Fp8Rows:
    """silu(gate) * up of gate_up [T, 2I], gate in the first I columns, to `out`, which is returned."""
    if dispatch.uses_triton(gate_up):
        from rose.kernels.jit import fp8 as jit

        jit.silu_mul_fp8(gate_up, out)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantized(torch.nn.functional.silu(gate) * up, out)


def bias_gelu_fp8(x: Tensor, bias: Tensor, out: Fp8Rows) -> Fp8Rows:
    """gelu(x [T, I] + bias [I]), the exact form with erf, to `out`, which is returned."""
    if dispatch.uses_triton(x):
        from rose.kernels.jit import fp8 as jit

        jit.bias_gelu_fp8(x, bias, out)
        return out
    return quantized(torch.nn.functional.gelu(x.float() + bias.float()), out)


def quantized(x: Tensor, out: Fp8Rows) -> Fp8Rows:
    """f32[T, K] to `out`, which is returned: the plain version, which allocates."""
    return scaled(x, x.abs().amax(1, keepdim=True), out)


def scaled(x: Tensor, largest: Tensor, out: Fp8Rows) -> Fp8Rows:
    """The same, where numbers of a row are as large as `largest` f32[T, 1] at most."""
    largest = largest.clamp(min=TINY)
    out.scale.copy_(largest / E4M3_MAX)
    out.values.copy_((x * (E4M3_MAX / largest)).to(E4M3))
    return out
