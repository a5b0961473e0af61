"""FP8 kernels against their plain versions, and what those versions promise."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import fp8
from rose.kernels.fp8 import E4M3, Fp8Rows, NormedRows, ScaledSquare
from rose.kernels.jit import fp8 as jit
from rose.kernels.norm import LayerNorm, RmsNorm

pytestmark = pytest.mark.usefixtures("right_casts")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64), (3, 384), (2, 1000), (5, 1024), (1, 3072)]


def room(shape: tuple[int, int], device: str) -> Fp8Rows:
    """NaN until written."""
    values = torch.full(shape, float("nan"), device=device).to(E4M3)
    return Fp8Rows(values, torch.full((shape[0], 1), float("nan"), device=device))


def random(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def on_cpu(rows: Fp8Rows) -> Fp8Rows:
    return Fp8Rows(rows.values.cpu(), rows.scale.cpu())


def same(actual: Fp8Rows, expected: Fp8Rows) -> None:
    """Scales to the last bits; values to one step of e4m3 where a hair decides, and hardly anywhere else."""
    torch.testing.assert_close(actual.scale.cpu(), expected.scale, rtol=1e-5, atol=0)
    a, b = actual.values.cpu().float(), expected.values.float()
    torch.testing.assert_close(a, b, rtol=2.0**-3, atol=2.0**-8)
    # A scale's last bit moves some, up to 7 of 64; another rounding would move half.
    assert (a != b).float().mean() <= 0.2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_rows(shape, dtype, device):
    x = random(*shape, dtype=dtype, device=device) * torch.logspace(-6, 6, shape[0], device=device)[
        :, None
    ].to(dtype)
    actual, expected = room(shape, device), room(shape, "cpu")
    jit.quantize_rows(x, actual)
    fp8.quantize_rows(x.cpu(), expected)
    same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape, dtype, device, close):
    x, residual = (random(*shape, dtype=dtype, device=device) for _ in range(2))
    norm = RmsNorm(1 + 0.1 * random(shape[1], dtype=dtype, device=device), 1e-6)
    plain, kept = residual.cpu().clone(), residual.clone()
    actual, expected = room(shape, device), room(shape, "cpu")
    jit.add_rms_norm_fp8(x, kept, norm, actual)
    fp8.add_rms_norm_fp8(x.cpu(), plain, RmsNorm(norm.weight.cpu(), norm.eps), expected)
    close(kept.cpu(), plain)
    same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_by_length(shape, dtype, device, close):
    x, residual = (random(*shape, dtype=dtype, device=device) for _ in range(2))
    norm = RmsNorm(1 + 0.1 * random(shape[1], dtype=dtype, device=device), 1e-6)
    plain, kept = residual.cpu().clone(), residual.clone()
    actual, expected = room(shape, device), room(shape, "cpu")
    squares = [ScaledSquare(torch.full_like(rows.scale, float("nan")), 3.0) for rows in (actual, expected)]
    jit.add_rms_norm_by_length(x, kept, norm, actual, squares[0])
    on_host = RmsNorm(norm.weight.cpu(), norm.eps)
    fp8.add_rms_norm_by_length(x.cpu(), plain, on_host, expected, squares[1])
    close(kept.cpu(), plain)
    same(actual, expected)
    torch.testing.assert_close(squares[0].values.cpu(), squares[1].values, rtol=1e-5, atol=0)
    # What the rows stand for is the norm; their length in e4m3's numbers is 448.
    by_largest, again = room(shape, "cpu"), residual.cpu().clone()
    fp8.add_rms_norm_fp8(x.cpu(), again, on_host, by_largest)
    assert torch.nn.functional.cosine_similarity(expected.float(), by_largest.float()).min() > 0.998
    lengths = torch.linalg.vector_norm(expected.values.float(), dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 448.0), rtol=2.0**-5, atol=0)
    torch.testing.assert_close(squares[1].values, 3.0 * expected.scale**2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_layer_norm(shape, dtype, device, close):
    x, residual = (random(*shape, dtype=dtype, device=device) for _ in range(2))
    weight, norm_bias, bias = (random(shape[1], dtype=dtype, device=device) for _ in range(3))
    actual = NormedRows(torch.empty_like(x), room(shape, device))
    expected = NormedRows(torch.empty_like(x).cpu(), room(shape, "cpu"))
    jit.add_layer_norm_fp8(x, residual, bias, LayerNorm(weight, norm_bias, 1e-5), actual)
    plain = LayerNorm(weight.cpu(), norm_bias.cpu(), 1e-5)
    fp8.add_layer_norm_fp8(x.cpu(), residual.cpu(), bias.cpu(), plain, expected)
    close(actual.rows.cpu(), expected.rows)
    same(actual.fp8, expected.fp8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(shape, dtype, device):
    gate_up = 3 * random(shape[0], 2 * shape[1], dtype=dtype, device=device)
    actual, expected = room(shape, device), room(shape, "cpu")
    jit.silu_mul_fp8(gate_up, actual)
    fp8.silu_mul_fp8(gate_up.cpu(), expected)
    same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_gelu(shape, dtype, device):
    x, bias = random(*shape, dtype=dtype, device=device), random(shape[1], dtype=dtype, device=device)
    actual, expected = room(shape, device), room(shape, "cpu")
    jit.bias_gelu_fp8(x, bias, actual)
    fp8.bias_gelu_fp8(x.cpu(), bias.cpu(), expected)
    same(actual, expected)


def test_rows_outside_are_left_alone(device):
    """Whole tiles of rows are taken; those past the last are another batch's."""
    actual = room((3, 64), device)
    whole = room((8, 64), device)
    view = Fp8Rows(whole.values[:3], whole.scale[:3])
    x = random(3, 64, dtype=torch.float32, device=device)
    jit.quantize_rows(x, actual)
    jit.quantize_rows(x, view)
    assert torch.equal(view.float().cpu(), actual.float().cpu())
    assert whole.float()[3:].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # NumPy's, of the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("triton", [True, False])
def test_what_is_not_finite_shows_in_every_column_of_a_product(bad, triton, device):
    x = random(3, 64, dtype=torch.float32, device=device)
    x[1, 5] = bad
    out = room((3, 64), device)
    (jit if triton else fp8).quantize_rows(x, out)
    product = (out.values.float() @ torch.ones(64, 4, device=device)) * out.scale
    assert product[1].isnan().all() and product[[0, 2]].isfinite().all()


@pytest.mark.parametrize("triton", [True, False])
def test_rows_of_zeros_and_of_denormals(triton, device):
    x = torch.zeros(3, 64, device=device)
    x[1, 3], x[2, 3] = 1e-40, 1e-25
    out = room((3, 64), device)
    (jit if triton else fp8).quantize_rows(x, out)
    found = out.float()
    assert (found[:2].abs() < 1e-30).all() and found.isfinite().all()
    assert found[2, 3].item() == pytest.approx(1e-25, rel=0.07)


def test_error_of_a_row_is_a_sixteenth_at_most():
    """e4m3 has three bits of fraction: half a step of 2⁻³, of any value above 2⁻⁶ of its scale."""
    x = torch.randn(16, 256)
    rows = fp8.quantize_rows(x, room((16, 256), "cpu")).float()
    assert ((rows - x).abs() <= x.abs() / 16 + x.abs().amax(1, keepdim=True) * 2.0**-18).all()
    assert torch.nn.functional.cosine_similarity(rows, x).min() > 0.999
