"""What the tuner tries, chooses and writes; the clock is a fake, the table's reader is the real one."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import gemm, tune_gemm
from rose.kernels.gemm import GemmPlan

DOWN, GATED = tune_gemm.SHAPES[0], tune_gemm.SHAPES[2]


def _problem(shape: tune_gemm.Shape, m: int) -> tune_gemm.Problem:
    return tune_gemm.Problem(shape, torch.zeros(m, shape.k), (), lambda product: None, torch.zeros(0))


@pytest.mark.parametrize("shape", tune_gemm.SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("m", tune_gemm.ROWS)
def test_candidates_fit_and_are_not_too_many(shape, m):
    plans = list(tune_gemm.candidates(shape, m))
    assert len(plans) == len(set(plans)) <= 32
    assert all(plan.fits(shape.n, shape.k) for plan in plans)
    assert not any(plan.swiglu for plan in plans) or shape.consumer == "silu"


def test_candidates_hold_what_was_best_before():
    assert GemmPlan(8, 16, 64, 128, 3, 4) in tune_gemm.candidates(DOWN, 16)
    assert GemmPlan(4, 64, 64, 64, 4, 4) in tune_gemm.candidates(DOWN, 128)


def _timed(monkeypatch, us_of) -> None:
    """graph_us gives us_of(plan) microseconds a product, without running it."""

    def fake(enqueue) -> float:
        return us_of(enqueue.args[0]) * tune_gemm.NUM_WEIGHTS

    monkeypatch.setattr(tune_gemm, "graph_us", fake)


def test_the_fastest_plan_is_written_and_read_back(monkeypatch, tmp_path):
    best = list(tune_gemm.candidates(GATED, 64))[-1]
    assert best.swiglu
    _timed(monkeypatch, lambda plan: 5.0 if plan == best else 10.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    line = tune_gemm.choose(_problem(GATED, 64))
    assert (line["us"], line["cublas_us"]) == (5.0, 10.0)
    tune_gemm.write(tmp_path / "table.json", [line])
    assert gemm.read_table(tmp_path / "table.json") == {(6144, 1024, True): [gemm.GemmChoice(64, best)]}


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
