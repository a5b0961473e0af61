"""The prepacked product is the plain one, whatever rides along with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import gelu, linear

import rose.layers.linear
from rose.layers.linear import Linear, _rows_a_part

SHAPES = [(384, 1152), (60, 92), (1, 1), (33, 7)]
ROWS = [1, 2, 15, 16, 17, 64, 257]


def _operands(inputs: int, outputs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(inputs + outputs + rows)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return x, weight, torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_as_torch(inputs: int, outputs: int, rows: int) -> None:
    x, weight, bias = _operands(inputs, outputs, rows)
    residual = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(1))
    with_bias, without = Linear(weight, bias), Linear(weight)
    expected = linear(x, weight, bias)
    torch.testing.assert_close(with_bias(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(without(x), linear(x, weight), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(with_bias.gelu(x), gelu(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(without.gelu(x), gelu(linear(x, weight)), rtol=1e-4, atol=1e-5)
    kept = residual.clone()
    torch.testing.assert_close(with_bias.add(x, residual), expected + residual, rtol=1e-4, atol=1e-5)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("rows", [1, 8, 9, 20, 33, 40])
def test_a_product_adds_by_itself_in_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 rows up to 32, whole beyond."""
    monkeypatch.setattr(rose.layers.linear, "_prepack", lambda weight: None)
    monkeypatch.setattr(rose.layers.linear, "_MOST_ROWS", 8)
    monkeypatch.setattr(rose.layers.linear, "_WHOLE_ROWS", 32)
    x, weight, bias = _operands(48, 40, rows)
    residual = torch.randn(rows, 40, generator=torch.Generator().manual_seed(1))
    expected = residual + linear(x, weight)
    assert not Linear(weight, bias).add_to(residual, x)
    assert Linear(weight).add_to(residual, x)
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(8193, 1024), (32_768, 1024), (12_800, 384)])
def test_more_rows_come_in_parts(shape: tuple[int, int]) -> None:
    assert _rows_a_part(*shape) == 8192


@given(
    st.tuples(st.integers(0, 131_072), st.integers(1025, 16_384))
    | st.tuples(st.integers(0, 8192) | st.integers(32_769, 131_072), st.integers(1, 1024))
)
@example((8193, 1025))
@example((8192, 1024))
@example((32_769, 1024))
def test_few_rows_very_many_and_wide_ones_are_one_part(shape: tuple[int, int]) -> None:
    assert _rows_a_part(*shape) == max(shape[0], 1)


def test_a_packed_product_leaves_the_sum_to_others() -> None:
    x, weight, _ = _operands(48, 40, 9)
    residual = torch.ones(9, 40)
    packed = Linear(weight)
    assert packed.add_to(residual, x) == (packed._packed is None)
    assert torch.equal(residual, torch.ones(9, 40)) or packed._packed is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_serves_packed_or_not(dtype: torch.dtype) -> None:
    x, weight, bias = (tensor.to(dtype) for tensor in _operands(48, 40, 9))
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-5)
    layer = Linear(weight, bias)
    assert ("plain" in repr(layer)) == (dtype in (torch.float64, torch.float16))
    expected = linear(x.double(), weight.double(), bias.double())
    for result, exact in (
        (layer(x), expected),
        (layer.gelu(x), gelu(expected)),
        (layer.add(x, x[:, :40]), expected + x[:, :40]),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_given_tensor_is_written_and_returned(dtype: torch.dtype) -> None:
    x, weight, bias = (tensor.to(dtype) for tensor in _operands(20, 12, 5))
    layer, out = Linear(weight, bias), torch.full((5, 12), float("nan"), dtype=dtype)
    assert layer(x, out) is out
    torch.testing.assert_close(out, linear(x, weight, bias), rtol=1e-4, atol=1e-5)
    assert layer.gelu(x, out) is out
    torch.testing.assert_close(out, gelu(linear(x, weight, bias)), rtol=1e-4, atol=1e-5)


def test_gelu_is_the_exact_one() -> None:
    """The tanh form is off by up to 5e-4 near 2: enough to be seen at rtol 1e-5."""
    x = torch.linspace(-4, 4, 64).reshape(-1, 1)
    layer = Linear(torch.ones(1, 1), torch.zeros(1))
    torch.testing.assert_close(layer.gelu(x), gelu(x), rtol=1e-5, atol=2e-6)
    assert (gelu(x) - gelu(x, approximate="tanh")).abs().max() > 1e-4


def test_changing_the_weight_later_changes_nothing() -> None:
    """The packed copy is the layer's own: a mapped file may go."""
    x, weight, bias = _operands(20, 12, 5)
    layer = Linear(weight, bias)
    expected = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), expected)
