"""How skinny_gemm divides products, and when its plans are read from the table."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
import torch

from rose.kernels import gemm, tune_gemm
from rose.kernels.cuda.cubin import SKINNY_GEMM
from rose.kernels.cuda.plan import SHARED_BYTES, TOKEN_TILES, SkinnyPlan, token_tile
from rose.kernels.gemm import GemmPlan
from rose.kernels.tables import write_choices

QKV = SkinnyPlan(splits=2, groups=1, cluster=1, stages=8)
TRITON = GemmPlan(splits=4, block_m=16, block_n=64, block_k=128, stages=2, warps=4)


def test_token_tiles_hold_their_rows():
    assert [token_tile(m) for m in (1, 16, 17, 64, 65, 256)] == [16, 16, 32, 64, 128, 256]
    with pytest.raises(ValueError, match="257 tokens; a block takes at most 256"):
        token_tile(257)


def test_shared_memory_and_grid_of_a_known_plan():
    # Barriers, 8 chunks of 128 tokens and 8 of 64 rows, 128 bytes each.
    assert QKV.shared_bytes(128, 1024) == 1024 + 8 * 128 * 128 + 8 * 64 * 128
    assert QKV.grid(4096) == (64, 2)
    assert QKV.threads() == 160
    assert QKV.kernel(100) == "skinny_1x64_128"
    assert replace(QKV, splits=1, stages=6, swiglu=True).kernel(7) == "skinny_gated_16"


@pytest.mark.parametrize(
    ("plan", "m", "n", "k"),
    [
        (QKV, 257, 4096, 1024),  # more tokens than a block takes
        (QKV, 0, 4096, 1024),
        (QKV, 128, 4000, 1024),  # rows of the weight left over
        (QKV, 128, 4096, 1000),  # columns left over
        (replace(QKV, cluster=2), 128, 64 * 3, 1024),  # a block without a partner
        (replace(QKV, cluster=4), 128, 4096, 1024),
        (replace(QKV, groups=4), 16, 4096, 1024),
        (replace(QKV, stages=1), 128, 4096, 1024),  # a ring of one waits for itself
        (replace(QKV, stages=9), 128, 4096, 1024),  # more stages than chunks
        (replace(QKV, splits=16, stages=1), 128, 4096, 1024),  # no room to transpose 128 tokens in
        (replace(QKV, splits=1, stages=16), 128, 4096, 1024),  # more memory than a processor has
        (replace(QKV, swiglu=True), 128, 6144, 1024),  # SwiGLU of partial sums
        (SkinnyPlan(1, 2, 1, 4, swiglu=True), 16, 6144, 1024),
        (SkinnyPlan(2, 2, 1, 2), 256, 4096, 1024),  # not among the kernels
    ],
)
def test_what_the_kernel_cannot_do_is_refused(plan, m, n, k):
    assert not plan.fits(m, n, k)


@pytest.mark.parametrize("shape", tune_gemm.SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("m", TOKEN_TILES)
def test_candidates_fit_are_compiled_and_not_too_many(shape, m):
    plans = list(tune_gemm.skinny_candidates(shape, m))
    source = SKINNY_GEMM.path.read_text("utf-8")
    assert 0 < len(plans) == len(set(plans)) <= 48
    for plan in plans:
        assert all(plan.fits(rows, shape.n, shape.k) for rows in (1, m // 2, m))
        assert plan.shared_bytes(m, shape.k) <= SHARED_BYTES
        family, tokens = plan.kernel(m).rsplit("_", 1)
        assert re.search(rf"KERNEL\({family}_(##tokens|{tokens}), {plan.groups}, ", source)
        assert f"KERNELS({tokens})" in source or f"KERNEL({plan.kernel(m)}," in source


def test_candidates_hold_what_was_best_on_an_h200():
    by_name = {shape.name: shape for shape in tune_gemm.SHAPES}
    assert QKV in tune_gemm.skinny_candidates(by_name["pplx qkv"], 128)
    assert SkinnyPlan(4, 1, 1, 8) in tune_gemm.skinny_candidates(by_name["pplx o"], 16)
    assert not list(tune_gemm.skinny_candidates(by_name["pplx o"], 257))


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.json"
    row = {"n": 4096, "k": 1024, "ending": "sum", "max_m": 16, "plan": asdict(TRITON), "skinny": asdict(QKV)}
    path.write_text(json.dumps({"choices": [row, {**row, "max_m": 64, "plan": None, "skinny": None}]}))
    return path


def test_the_table_gives_skinny_plans_only_where_there_are_kernels(table, monkeypatch):
    key = (4096, 1024, "sum")
    for skinny, plan in ((False, TRITON), (True, QKV)):
        choices = gemm.read_table(table, skinny)
        monkeypatch.setattr(gemm, "table", lambda choices=choices: choices)
        assert gemm.gemm_plan(16, *key) == plan
        assert gemm.gemm_plan(17, *key) is None
        assert gemm.fetches_early(16, [key, (1, 1, "swiglu")]) is skinny
        assert not gemm.fetches_early(17, [key])
        assert gemm.partial_elements(key) == plan.splits * 16 * 4096


def test_a_skinny_plan_that_does_not_fit_is_refused_when_it_would_be_used(table):
    table.write_text(table.read_text().replace('"stages": 8', '"stages": 1'))
    gemm.read_table(table)
    with pytest.raises(ValueError, match=r"SkinnyPlan\(.*does not fit n=4096, k=1024"):
        gemm.read_table(table, skinny=True)


def test_the_tuner_notes_a_skinny_plan_beside_the_best_without_it(monkeypatch, tmp_path):
    shape = next(shape for shape in tune_gemm.SHAPES if shape.name == "pplx qkv")
    none = torch.zeros(0)
    one = tune_gemm.Problem(shape, torch.zeros(16, shape.k), (), lambda product: None, none, none)
    us = {TRITON: 6.0, QKV: 4.0}

    def fake(enqueue) -> float:
        return us.get(enqueue.args[0], 8.0) * tune_gemm.NUM_WEIGHTS

    monkeypatch.setattr(tune_gemm, "graph_us", fake)
    monkeypatch.setattr(tune_gemm, "candidates", lambda shape, m: iter([TRITON]))
    monkeypatch.setattr(tune_gemm, "skinny_kernels", lambda: None)
    without = tune_gemm.choose(one)
    assert "skinny" not in without
    monkeypatch.setattr(tune_gemm, "skinny_kernels", object)
    line = tune_gemm.choose(one)
    assert (line["us"], line["skinny_us"], line["cublas_us"]) == (6.0, 4.0, 8.0)
    merged = tune_gemm.merge([without, {**without, "max_m": 32}], [line])
    assert merged == [line, {**without, "max_m": 32}]
    write_choices(tmp_path / "table.json", "a GPU", merged)
    choices = gemm.read_table(tmp_path / "table.json", skinny=True)
    assert [choice.plan for choice in choices[shape.n, shape.k, "sum"]] == [QKV, TRITON]


def test_skinny_only_keeps_the_plans_that_are_known(monkeypatch, table):
    shape = next(shape for shape in tune_gemm.SHAPES if shape.name == "pplx qkv")
    monkeypatch.setattr(tune_gemm, "_random", lambda *size: torch.zeros(1))
    monkeypatch.setattr(tune_gemm, "_compile", lambda problems: None)
    monkeypatch.setattr(tune_gemm, "skinny_kernels", object)
    monkeypatch.setattr(
        tune_gemm,
        "problem",
        lambda shape, m, weights: tune_gemm.Problem(
            shape, torch.zeros(m, shape.k), weights, lambda product: None, torch.zeros(0), torch.zeros(0)
        ),
    )

    def fake(enqueue) -> float:
        return (4.0 if enqueue.args[0] == QKV else 8.0) * tune_gemm.NUM_WEIGHTS

    monkeypatch.setattr(tune_gemm, "graph_us", fake)
    lines = list(tune_gemm.tune_skinny(shape, gemm.read_table(table)))
    assert [line["max_m"] for line in lines] == list(TOKEN_TILES)
    assert [line["plan"] for line in lines] == [asdict(TRITON), None, None, None, None]
    # 256 tokens do not fit with eight chunks of x.
    assert [line.get("skinny") for line in lines] == [asdict(QKV)] * 4 + [None]
