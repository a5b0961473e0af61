"""What the tuner tries, chooses and writes; the clock is a fake, the table's reader is the real one."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import gemm, tune_gemm
from rose.kernels.activation import add_bias, bias_gelu, silu_mul
from rose.kernels.gemm import GemmPlan
from rose.kernels.tables import write_choices

DOWN, GATED = tune_gemm.SHAPES[0], tune_gemm.SHAPES[2]


def _problem(shape: tune_gemm.Shape, m: int) -> tune_gemm.Problem:
    none = torch.zeros(0)
    return tune_gemm.Problem(shape, torch.zeros(m, shape.k), (), lambda product: None, none, none)


# What was best on an H200 of four times as many candidates; from 384 rows on cuBLAS, but for one.
BEST = [
    (0, 16, GemmPlan(4, 16, 32, 128, 4, 4)),
    (0, 128, GemmPlan(4, 64, 64, 128, 4, 4)),
    (0, 256, GemmPlan(4, 64, 128, 128, 4, 4)),
    (1, 192, GemmPlan(4, 64, 128, 64, 4, 4)),
    (2, 32, GemmPlan(1, 16, 64, 128, 4, 4, fused="swiglu")),
    (2, 64, GemmPlan(1, 64, 32, 128, 4, 4, fused="swiglu")),
    (3, 16, GemmPlan(4, 16, 64, 64, 4, 4)),
    (3, 64, GemmPlan(2, 64, 64, 128, 4, 4)),
    (4, 192, GemmPlan(8, 64, 64, 64, 4, 4)),
    (4, 512, GemmPlan(4, 64, 128, 64, 4, 4)),
    (5, 64, GemmPlan(4, 64, 32, 64, 4, 4)),
    (5, 256, GemmPlan(2, 64, 64, 128, 4, 4)),
]


@pytest.mark.parametrize("shape", tune_gemm.SHAPES, ids=lambda shape: shape.name)
def test_candidates_fit_and_are_not_too_many(shape):
    kernels = set()
    for m in tune_gemm.ROWS:
        plans = list(tune_gemm.candidates(shape, m))
        assert len(plans) == len(set(plans)) <= 24
        assert all(plan.fits(shape.n, shape.k) for plan in plans)
        assert all(plan.shared_bytes <= 232_448 for plan in plans)  # else the launch fails
        assert {plan.fused for plan in plans} <= {"sum", shape.ending}
        kernels.update(plans)
    assert len(kernels) <= 48  # compiling them is most of the tuner's time


@pytest.mark.parametrize(("shape", "m", "plan"), BEST)
def test_candidates_hold_what_was_best_before(shape, m, plan):
    assert plan in tune_gemm.candidates(tune_gemm.SHAPES[shape], m)


def test_tiles_that_need_more_memory_than_there_is_are_left_out(monkeypatch):
    monkeypatch.setattr(tune_gemm, "SHARED_BYTES", 100_000)
    assert GemmPlan(4, 64, 64, 128, 4, 4).shared_bytes == 131_072
    assert GemmPlan(4, 64, 64, 128, 4, 4) not in tune_gemm.candidates(DOWN, 128)
    assert GemmPlan(4, 64, 64, 64, 4, 4) in tune_gemm.candidates(DOWN, 128)


@pytest.mark.parametrize("shape", tune_gemm.SHAPES, ids=lambda shape: shape.name)
def test_every_way_computes_the_same(shape):
    """cuBLAS's, split K and the fused ending, each followed by what it leaves to do."""
    weight, bias = torch.randn(shape.n, shape.k).mul(0.05), torch.randn(shape.n)
    x, ended = torch.randn(2, shape.k), torch.empty(2, shape.n // (2 if shape.ending == "swiglu" else 1))
    consume = {
        "sum": lambda y: ended.copy_(y.sum(0) if y.dim() == 3 else y),
        "bias": lambda y: add_bias(y, bias, ended),
        "gelu": lambda y: bias_gelu(y, bias, ended),
        "swiglu": lambda y: silu_mul(y, ended),
    }[shape.ending]
    one, results = tune_gemm.Problem(shape, x, [weight], consume, bias, ended), []
    for plan in (None, GemmPlan(4, 16, 32, 64, 4, 4), GemmPlan(1, 16, 32, 64, 4, 4, fused=shape.ending)):
        ended.fill_(float("nan"))
        one.enqueue(plan)
        results.append(ended.clone())
    assert results[0].std() > 0.1
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", tune_gemm.SHAPES, ids=lambda shape: shape.name)
def test_cublas_adds_to_the_residual_stream_by_itself_as_it_serves(shape, monkeypatch):
    normed = []
    monkeypatch.setattr(tune_gemm, "_random", torch.randn)
    monkeypatch.setattr(tune_gemm, "_rope", lambda m, qkv: lambda y: None)
    for norm in ("add_rms_norm", "add_layer_norm"):
        monkeypatch.setattr(tune_gemm, norm, lambda x, residual, *_: normed.append((x, residual.clone())))
    weights = torch.randn(2, shape.n, shape.k)
    one = tune_gemm.problem(shape, 3, list(weights))
    one.enqueue(None)
    if shape.consumer not in ("rms_norm", "layer_norm"):
        assert not normed
        return
    (x, first), (_, second) = normed
    assert x is None
    torch.testing.assert_close(second - first, one.x @ weights[1].T, rtol=1e-3, atol=1e-3)
    one.enqueue(GemmPlan(4, 16, 32, 64, 4, 4))
    assert normed[-1][0].shape == (4, 3, shape.n) and torch.equal(normed[-1][1], second)


def _timed(monkeypatch, us_of) -> None:
    """graph_us gives us_of(plan) microseconds a product, without running it."""

    def fake(enqueue) -> float:
        return us_of(enqueue.args[0]) * tune_gemm.NUM_WEIGHTS

    monkeypatch.setattr(tune_gemm, "graph_us", fake)


def test_the_fastest_plan_is_written_and_read_back(monkeypatch, tmp_path):
    best = list(tune_gemm.candidates(GATED, 64))[-1]
    assert best.swiglu
    _timed(monkeypatch, lambda plan: 5.0 if plan == best else 10.0)
    line = tune_gemm.choose(_problem(GATED, 64))
    assert (line["us"], line["cublas_us"]) == (5.0, 10.0)
    write_choices(tmp_path / "table.json", "a GPU", [line])
    assert gemm.read_table(tmp_path / "table.json") == {(6144, 1024, "swiglu"): [gemm.GemmChoice(64, best)]}


def test_cublas_stays_where_the_gain_is_noise(monkeypatch):
    _timed(monkeypatch, lambda plan: 10.0 if plan is None else 9.8)
    assert tune_gemm.choose(_problem(DOWN, 64))["plan"] is None


def test_a_plan_that_fails_is_left_out(monkeypatch, capsys):
    broken, *_, good = tune_gemm.candidates(DOWN, 16)

    def us_of(plan: GemmPlan | None) -> float:
        if plan == broken:
            raise RuntimeError("out of shared memory")
        return 4.0 if plan == good else 9.0

    _timed(monkeypatch, us_of)
    assert tune_gemm.choose(_problem(DOWN, 16))["us"] == 4.0
    assert "out of shared memory" in capsys.readouterr().out
