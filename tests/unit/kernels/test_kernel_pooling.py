"""Pooling kernels against sums in fp64, and the quantiser at its ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.device_batch import Outputs
from rose.kernels import pooling, quantize
from rose.kernels.jit import pooling as jit
from rose.kernels.norm import RmsNorm

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [[1], [5, 0, 9], [0, 37, 2, 0], [150]]


def _offsets(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def _pooled(rows: torch.Tensor, lengths: list[int], how: str) -> torch.Tensor:
    picked = []
    for part in rows.double().cpu()[: sum(lengths)].split(lengths):
        if len(part) == 0:
            picked.append(torch.zeros(rows.shape[1], dtype=torch.float64))
        else:
            picked.append({"mean": part.mean(0), "first": part[0], "last": part[-1]}[how])
    return torch.stack(picked)


def _check(outputs: Outputs, expected: torch.Tensor) -> None:
    vectors = outputs.vectors.cpu()
    torch.testing.assert_close(vectors.double(), expected, rtol=1e-5, atol=1e-5)
    if outputs.int8 is not None:
        exact = np.tanh(expected.numpy()) * 127
        assert (np.abs(outputs.int8.cpu().numpy() - exact) <= 0.5 + 1e-3).all()


def _outputs(poisoned, num_seqs: int, hidden: int, quantized: bool) -> Outputs:
    vectors = poisoned(num_seqs, hidden, dtype=torch.float32)
    return Outputs(vectors, poisoned(num_seqs, hidden, dtype=torch.int8) if quantized else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_mean_pool(lengths, quantized, dtype, device, poisoned):
    hidden = torch.randn(sum(lengths) + 3, 96, device=device).to(dtype)
    hidden[sum(lengths) :] = float("nan")  # padding must not be read
    offsets = _offsets(lengths, device)
    expected = _pooled(hidden, lengths, "mean")
    outputs = _outputs(poisoned, len(lengths), 96, quantized)
    jit.mean_pool(hidden, offsets, outputs, pooling.pool_scratch(96, device))
    _check(outputs, expected)
    plain = Outputs(torch.empty(len(lengths), 96), torch.empty(len(lengths), 96, dtype=torch.int8))
    pooling.mean_pool(hidden.cpu(), offsets.cpu(), plain, pooling.pool_scratch(96, "cpu"))
    _check(plain, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("how", ["mean", "first", "last"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_final_norm_and_pool(lengths, how, splits, dtype, device, poisoned):
    """splits: partial sums that are still to be added; 0: the residual stream is all there is."""
    tokens, hidden = sum(lengths) + 2, 72
    sums = torch.randn((splits, tokens, hidden), device=device).to(dtype)
    x = sums if splits > 1 else sums[0] if splits else None
    residual = torch.randn(tokens, hidden, device=device).to(dtype)
    # A large epsilon tells a residual stream from twice itself.
    norm = RmsNorm(torch.randn(hidden, device=device).to(dtype), 1e-6 if splits else 1.0)
    total = residual.double() + sums.double().sum(0)
    normed = torch.nn.functional.rms_norm(total, (hidden,), norm.weight.double(), norm.eps)
    expected, offsets = _pooled(normed, lengths, how), _offsets(lengths, device)
    outputs = _outputs(poisoned, len(lengths), hidden, True)
    _pool(jit, pooling.LastHidden(x, residual, norm), offsets, how, outputs)
    _check(outputs, expected)
    plain = Outputs(torch.empty(len(lengths), hidden), torch.empty(len(lengths), hidden, dtype=torch.int8))
    left = None if x is None else x.cpu()
    on_cpu = pooling.LastHidden(left, residual.cpu(), RmsNorm(norm.weight.cpu(), norm.eps))
    _pool(pooling, on_cpu, offsets.cpu(), how, plain)
    _check(plain, expected)


def _pool(module, last, offsets, how, outputs):
    if how == "mean":
        scratch = pooling.pool_scratch(last.residual.shape[1], last.residual.device)
        module.norm_mean_pool(last, offsets, outputs, scratch)
    else:
        module.norm_gather_rows(last, offsets, how, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["first", "last"])
def test_gather_rows(which, dtype, device, poisoned):
    lengths = [2, 0, 1, 4]
    hidden = torch.randn(9, 40, device=device).to(dtype)
    offsets, expected = _offsets(lengths, device), _pooled(hidden, lengths, which)
    outputs = _outputs(poisoned, 4, 40, False)
    jit.gather_rows(hidden, offsets, which, outputs)
    _check(outputs, expected)
    plain = Outputs(torch.empty(4, 40))
    pooling.gather_rows(hidden.cpu(), offsets.cpu(), which, plain)
    _check(plain, expected)


def test_one_row_a_sequence(device, poisoned):
    """As one_query_attention leaves them."""
    offsets, rows = _offsets([0, 1, 2, 1], device), torch.randn(4, 40, device=device)
    expected = rows.double().cpu()
    expected[0] = 0  # whatever an empty sequence's row holds, its vector is zero
    outputs = _outputs(poisoned, 4, 40, True)
    jit.gather_rows(rows, offsets, "only", outputs)
    _check(outputs, expected)
    plain = Outputs(torch.empty(4, 40))
    pooling.gather_rows(rows.cpu(), offsets.cpu(), "only", plain)
    _check(plain, expected)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_same_bits_alone_and_beside_others(lengths):
    """With as many parts a sequence, a mean depends on nothing but its own rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(1)).to(device)
    together = Outputs(torch.full((len(lengths), 32), float("nan"), device=device))
    scratch = pooling.pool_scratch(32, device)
    jit.mean_pool(hidden, _offsets(lengths, device), together, scratch[: len(lengths)])
    for row, part in zip(together.vectors, hidden.split(lengths), strict=True):
        if len(part):
            alone = Outputs(torch.empty(1, 32, device=device))
            jit.mean_pool(part, _offsets([len(part)], device), alone, scratch[:1])
            assert torch.equal(alone.vectors[0], row)


def test_more_sequences_than_scratch_rows(device, poisoned):
    lengths = [2, 3, 0, 4, 1]
    hidden = torch.randn(sum(lengths), 320, device=device)
    outputs = _outputs(poisoned, 5, 320, True)
    jit.mean_pool(hidden, _offsets(lengths, device), outputs, pooling.pool_scratch(320, device)[:3])
    _check(outputs, _pooled(hidden, lengths, "mean"))


@pytest.mark.parametrize("module", [jit, pooling], ids=["triton", "plain"])
def test_long_mean_keeps_its_digits(module, device):
    """4096 tokens around 100: bf16 sums would be off by whole units, so would be those of normed rows."""
    where = device if module is jit else "cpu"
    hidden = (100 + torch.randn(4096, 16, device=where)).to(torch.bfloat16)
    offsets, scratch = _offsets([4096], where), pooling.pool_scratch(16, where)
    outputs = Outputs(torch.full((1, 16), float("nan"), device=where))
    module.mean_pool(hidden, offsets, outputs, scratch)
    _check(outputs, _pooled(hidden, [4096], "mean"))
    norm = RmsNorm(torch.ones(16, device=where, dtype=torch.bfloat16), 1e-6)
    normed = torch.nn.functional.rms_norm(2 * hidden.double(), (16,), eps=norm.eps)
    module.norm_mean_pool(pooling.LastHidden(hidden, hidden, norm), offsets, outputs, scratch)
    _check(outputs, _pooled(normed, [4096], "mean"))


@pytest.mark.parametrize("num_seqs", [1, 3, 100, 512, 1000])
def test_parts_fit_the_scratch(num_seqs):
    for tokens in (1, 64, 4096, 51200):
        parts = jit.parts_for(num_seqs, tokens, pooling.SCRATCH_ROWS)
        assert 1 <= parts <= 128
        assert parts == 1 or parts * num_seqs <= pooling.SCRATCH_ROWS
    assert jit.parts_for(1, 32, pooling.SCRATCH_ROWS) == 1
    assert jit.parts_for(1, 512, pooling.SCRATCH_ROWS) == 128


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, whose tanh is 1
def test_tanh_int8(device, poisoned):
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        [torch.randn(2000, generator=generator), torch.tensor([0.0, -0.0, 1e-8, 40, -40, 1e30])]
    )
    values = values.view(2, -1).to(device)
    out = poisoned(*values.shape, dtype=torch.int8)
    jit.tanh_int8(values, out)
    exact = np.tanh(values.double().cpu().numpy()) * 127
    assert (np.abs(out.cpu().numpy() - exact) <= 0.5 + 1e-4).all()
    plain = torch.empty(values.shape, dtype=torch.int8)
    quantize.tanh_int8(values.cpu(), plain)
    assert (np.abs(plain.numpy() - exact) <= 0.5 + 1e-4).all()


def test_rounding_constant_rounds_half_to_even():
    """What the kernel adds and subtracts, on exact ties, which no tanh of a float reaches."""
    ties = np.arange(-126.5, 127, 1, dtype=np.float32)
    magic = np.float32(12582912.0)
    assert np.array_equal((ties + magic) - magic, np.round(ties))
