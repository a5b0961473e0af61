"""How the tuner of fused products decides and what it writes; the clock is faked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rose.kernels.fused import FusedChoice, FusedGemm, FusedLookup, read_table
from rose.layers import tune_fused
from rose.layers.tune_fused import fastest, forced, write
from tests.unit.kernels.fused_fake import fake_lookup

SLOW, FAST = (fake_lookup("gelu", 1, 1, 1) for _ in range(2))


def timed(plain: float, slow: float, fast: float) -> Callable[[FusedLookup], Callable[[], object]]:
    """What is enqueued is how long it takes, by the kernel that the lookup gives: µs a layer."""
    found = {None: plain, SLOW: slow, FAST: fast}
    return lambda lookup: lambda: found[lookup("gelu", 1, 1, 1)]


@pytest.mark.parametrize(
    ("fast", "kernel", "us"), [(80.0, FAST, 80.0), (98.5, None, 100.0), (120.0, None, 100.0)]
)
def test_a_kernel_must_be_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, fast: float, kernel: FusedGemm | None, us: float
) -> None:
    monkeypatch.setattr(tune_fused, "layer_us", lambda enqueue, m: enqueue())
    best, best_us, plain_us = fastest([{"gelu": SLOW}, {"gelu": FAST}], timed(100.0, 99.0, fast), 512)
    assert (best.get("gelu"), best_us, plain_us) == (kernel, us, 100.0)


def test_forced_kernels_are_the_only_ones() -> None:
    lookup = forced({"gelu": FAST})
    assert lookup("gelu", 1, 2, 3) is FAST
    assert lookup("swiglu", 1, 2, 3) is None


def test_a_line_a_change_is_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    name = FAST.kernel.name
    lines = [
        {"epilogue": "gelu", "n": 64, "k": 32, "min_m": m, "kernel": kernel, "us": 1.0, "plain_us": 2.0}
        for m, kernel in ((512, None), (768, name), (1024, name), (2048, None), (4096, None))
    ]
    write(tmp_path / "table.json", lines)
    assert read_table(tmp_path / "table.json") == {
        ("gelu", 64, 32): [FusedChoice(768, FAST.kernel), FusedChoice(2048, None)]
    }
    assert json.loads((tmp_path / "table.json").read_text())["device"] == "NVIDIA H200"


def test_time_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tune_fused._rows_until(0.0)) == []
    assert "out of time at 512 rows" in capsys.readouterr().out
    assert list(tune_fused._rows_until(float("inf"))) == list(tune_fused.ROWS)
