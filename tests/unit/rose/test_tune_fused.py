"""How the tuner of fused products decides and what it writes; the clock is faked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rose.kernels.fused import FusedChoice, FusedGemm, FusedKey, read_table
from rose.layers import tune_fused
from rose.layers.tune_fused import Chosen, Line, fastest, forced, write
from tests.unit.kernels.fused_fake import fake_lookup

SLOW, FAST = (fake_lookup("gelu", 1, 1, 1) for _ in range(2))


KEY: FusedKey = ("gelu", 64, 32)


@pytest.mark.parametrize(
    ("fast", "kernel", "us"), [(80.0, FAST, 80.0), (98.5, None, 100.0), (120.0, None, 100.0)]
)
def test_a_kernel_must_be_clearly_faster(fast: float, kernel: FusedGemm | None, us: float) -> None:
    times = {None: 100.0, SLOW: 99.0, FAST: fast}
    best, (best_us, plain_us) = fastest({KEY: [SLOW, FAST]}, {}, lambda chosen: times[chosen.get(KEY)])
    assert (best.get(KEY), best_us, plain_us) == (kernel, us, 100.0)


def test_each_place_gets_its_best_from_what_was_best_before() -> None:
    other: FusedKey = ("gelu", 128, 32)
    times = {(SLOW, SLOW): 90.0, (FAST, SLOW): 95.0, (SLOW, FAST): 70.0, (FAST, FAST): 60.0}
    tried: list[Chosen] = []

    def us_of(chosen: Chosen) -> float:
        tried.append(chosen)
        return times[chosen[KEY], chosen[other]] if chosen else 100.0

    both = {KEY: [SLOW, FAST], other: [SLOW, FAST]}
    best, us = fastest(both, {KEY: SLOW, other: FAST}, us_of)
    assert (best, us) == ({KEY: FAST, other: FAST}, (60.0, 100.0))
    assert tried[1] == {KEY: SLOW, other: FAST}


def test_a_product_without_a_kernel_leaves_all_to_what_is_there() -> None:
    other: FusedKey = ("gelu", 128, 32)
    assert fastest({KEY: [FAST], other: []}, {}, lambda chosen: 100.0) == ({}, (100.0, 100.0))


def test_forced_kernels_are_the_only_ones() -> None:
    lookup = forced({"gelu": FAST})
    assert lookup("gelu", 1, 2, 3) is FAST
    assert lookup("swiglu", 1, 2, 3) is None


@pytest.mark.parametrize("resume", [None, 8192])
def test_a_line_a_change_is_written_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    name = FAST.kernel.name
    common: Line = {"epilogue": "gelu", "n": 64, "k": 32, "us": 1.0, "plain_us": 2.0}
    old = [{**common, "min_m": 512, "kernel": name}, {**common, "min_m": 10240, "kernel": None}]
    monkeypatch.setattr(tune_fused, "in_use", lambda path, read: old)
    found = ((2048, None), (2304, name), (2560, name), (4096, None))
    lines: list[Line] = [{**common, "min_m": m, "kernel": kernel} for m, kernel in found]
    write(tmp_path / "table.json", lines, [2048, 2304, 2560, 4096, *([resume] if resume else [])])
    ours = [(512, FAST), (2048, None), (2304, FAST), (4096, None)]
    after = [] if resume is None else [(8192, FAST), (10240, None)]
    assert read_table(tmp_path / "table.json") == {
        KEY: [FusedChoice(m, gemm.kernel if gemm else None) for m, gemm in [*ours, *after]]
    }
    assert json.loads((tmp_path / "table.json").read_text())["device"] == "NVIDIA H200"


def test_time_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tune_fused._rows_until(0.0)) == []
    assert "out of time at 2048 rows" in capsys.readouterr().out
    assert list(tune_fused._rows_until(float("inf"))) == sorted(tune_fused.ROWS)
