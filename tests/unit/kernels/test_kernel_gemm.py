"""Products in Triton against PyTorch's, the shipped table, and the choice of a plan."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from rose.kernels import gemm
from rose.kernels.jit import gemm as jit

PLAN = gemm.GemmPlan(splits=2, block_m=16, block_n=32, block_k=32, stages=2, warps=4)
# The interpreter multiplies no bf16; fp16 takes the same path through the kernel.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.mark.parametrize("m", [1, 16, 33])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_split_k_gemm(m, splits, device, poisoned):
    plan = gemm.GemmPlan(splits, 16, 32, 32, 2, 4)
    x, weight = (torch.randn(rows, 256, device=device).to(DTYPE) for rows in (m, 64))
    partials = poisoned(splits, m, 64, dtype=torch.float32)
    jit.split_k_gemm(x, weight, plan, partials)
    for part, x_part, w_part in zip(partials, x.chunk(splits, 1), weight.chunk(splits, 1), strict=True):
        torch.testing.assert_close(part, x_part.float() @ w_part.float().T, rtol=1e-4, atol=1e-3)
    plain = torch.empty(splits, m, 64)
    gemm.split_k_gemm(x.cpu(), weight.cpu(), plan, plain)
    torch.testing.assert_close(plain, partials.cpu(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("m", [1, 16, 33])
def test_swiglu_gemm(m, device, poisoned):
    plan = gemm.GemmPlan(1, 16, 32, 32, 2, 4)
    x, weight = (torch.randn(rows, 64, device=device).to(DTYPE) for rows in (m, 128))
    out = poisoned(m, 64, dtype=torch.float32)
    jit.swiglu_gemm(x, weight, plan, out)
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-2)
    plain = torch.empty(m, 64)
    gemm.swiglu_gemm(x.cpu(), weight.cpu(), plan, plain)
    torch.testing.assert_close(plain, expected.cpu(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("m", [1, 16, 33])
@pytest.mark.parametrize("ending", ["bias", "gelu"])
def test_bias_gemm(m, ending, device, poisoned):
    plan = gemm.GemmPlan(1, 16, 32, 32, 2, 4, fused=ending)
    x, weight = (torch.randn(rows, 64, device=device).to(DTYPE) for rows in (m, 96))
    bias = torch.randn(96, device=device).to(DTYPE)
    out = poisoned(m, 96, dtype=torch.float32)
    jit.bias_gemm(x, weight, bias, plan, out)
    expected = x.float() @ weight.float().T + bias.float()
    expected = torch.nn.functional.gelu(expected) if ending == "gelu" else expected
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    plain = torch.empty(m, 96)
    gemm.bias_gemm(x.cpu(), weight.cpu(), bias.cpu(), plan, plain)
    torch.testing.assert_close(plain, expected.cpu(), rtol=1e-3, atol=1e-3)


def test_shipped_table_is_readable_and_sorted():
    for choices in gemm.table().values():
        limits = [choice.max_m for choice in choices]
        assert limits == sorted(set(limits))


def _row(max_m: int, plan: gemm.GemmPlan | None, n: int = 64, ending: str = "sum") -> dict[str, object]:
    return {"n": n, "k": 256, "ending": ending, "max_m": max_m, "plan": plan and asdict(plan)}


def test_plan_is_the_first_that_covers_m(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    fused = replace(PLAN, splits=1, fused="swiglu")
    rows = [_row(64, None), _row(16, PLAN), _row(32, fused, ending="swiglu")]
    path.write_text(json.dumps({"choices": rows}))
    choices = gemm.read_table(path)
    monkeypatch.setattr(gemm, "table", lambda: choices)
    assert gemm.gemm_plan(1, 64, 256) == gemm.gemm_plan(16, 64, 256) == PLAN
    assert gemm.gemm_plan(17, 64, 256) is None
    assert gemm.gemm_plan(65, 64, 256) is None
    assert gemm.gemm_plan(16, 64, 512) is None
    assert gemm.gemm_plan(32, 64, 256, "swiglu") == fused
    assert gemm.partial_elements((64, 256, "sum")) == 2 * 16 * 64
    assert gemm.partial_elements((64, 512, "sum")) == 0
    assert gemm.plan_rows([(64, 256, "sum"), (64, 256, "swiglu")]) == [16, 32, 64]
    assert gemm.plan_rows([(1, 1, "sum")]) == []


@pytest.mark.parametrize(
    ("n", "plan"),
    [
        (48, PLAN),
        (64, replace(PLAN, block_k=256)),
        (96, replace(PLAN, splits=1, fused="swiglu")),
        (64, replace(PLAN, fused="gelu")),  # GELU of partial sums
    ],
)
def test_plan_that_does_not_fit_is_refused(n, plan, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"choices": [_row(16, plan, n=n)]}))
    with pytest.raises(ValueError, match=f"does not fit n={n}"):
        gemm.read_table(path)
