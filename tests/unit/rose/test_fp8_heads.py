"""Scales of heads: whatever the rows and weights, nothing is larger than they allow, nor much smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.configs.rope import YarnScaling
from rose.kernels.fp8 import E4M3_MAX, Fp8Rows, quantized
from rose.kernels.norm import RmsNorm, rms_normalized
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.layers.fp8_heads import head_scales
from rose.layers.fp8_linear import Fp8Linear

HEADS, KV_HEADS, DIM, WIDTH, ROWS = 4, 2, 16, 48, 40
ALL = HEADS + 2 * KV_HEADS


def spread(*shape: int, decades: float) -> torch.Tensor:
    """Numbers of very different sizes."""
    return torch.randn(shape) * 10 ** (decades * (torch.rand(shape) - 0.5))


def layer(decades: float, biased: bool, yarn: bool) -> tuple[RmsNorm, Fp8Rows, QkRope]:
    norm = RmsNorm(spread(WIDTH, decades=decades), 1e-6)
    weight = quantized(spread(ALL * DIM, WIDTH, decades=decades), Fp8Rows.empty(ALL * DIM, WIDTH, "cpu"))
    scaling = YarnScaling(8.0, 64, 1.0, 32.0, 1.3, True) if yarn else None
    table = rope_table(DIM, 1e4, ROWS, "cpu", scaling)
    rope = QkRope(HEADS, KV_HEADS, DIM, 1e-6, spread(2, DIM, decades=decades), table)
    bias = 100.0 * spread(ALL * DIM, decades=decades) if biased else None
    return norm, weight, replace(rope, bias=bias)


def heads_of(hidden: torch.Tensor, norm: RmsNorm, weight: Fp8Rows, rope: QkRope) -> torch.Tensor:
    """f32[ROWS, ALL, DIM]: q, k and v of the residual stream, as the layer makes them."""
    rows = quantized(rms_normalized(hidden, norm), Fp8Rows.empty(len(hidden), WIDTH, "cpu"))
    product = Fp8Linear(weight)(rows, torch.empty(len(hidden), ALL * DIM).bfloat16()).float()
    qk_norm_rope(product, torch.arange(len(hidden)).int(), rope, product)
    return product.view(len(hidden), ALL, DIM)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    decades=st.floats(0, 4),
    biased=st.booleans(),
    yarn=st.booleans(),
    aimed=st.booleans(),
)
def test_no_row_exceeds_them(seed: int, decades: float, biased: bool, yarn: bool, aimed: bool) -> None:
    """aimed: rows that are what makes one column of the product as large as it can be."""
    torch.manual_seed(seed)
    norm, weight, rope = layer(decades, biased, yarn)
    scales = head_scales(norm, weight, rope)
    assert scales is not None
    hidden = spread(ROWS, WIDTH, decades=decades)
    if aimed:
        hidden = weight.float()[torch.randint(0, ALL * DIM, (ROWS,))] * norm.weight
    largest = heads_of(hidden, norm, weight, rope).abs().amax((0, 2))
    assert (largest / scales <= E4M3_MAX).all()


def test_they_are_no_larger_than_that_takes() -> None:
    """Rows aimed at the values reach nine tenths, and a head of q or k with a single number all."""
    torch.manual_seed(0)
    norm, weight, rope = layer(1.0, biased=False, yarn=False)
    scales = head_scales(norm, weight, rope)
    assert scales is not None
    values = weight.float()[(HEADS + KV_HEADS) * DIM :]
    reached = heads_of(values * norm.weight, norm, weight, rope).abs().amax((0, 2)) / scales / E4M3_MAX
    assert (reached[-KV_HEADS:] > 0.9).all()
    single = torch.zeros(1, ALL * DIM)
    assert rope.weight is not None
    for head in range(HEADS + KV_HEADS):
        single[0, head * DIM + int(rope.weight[int(head >= HEADS)].abs().argmax())] = 5.0
    qk_norm_rope(single, torch.zeros(1).int(), rope, single)
    reached = single.view(ALL, DIM).abs().amax(1) / scales / E4M3_MAX
    assert reached[: HEADS + KV_HEADS].tolist() == pytest.approx([1.0] * (HEADS + KV_HEADS), rel=1e-3)


def test_there_are_none_without_norms_of_heads() -> None:
    norm, weight, rope = layer(1.0, biased=False, yarn=False)
    assert head_scales(norm, weight, replace(rope, weight=None)) is None
