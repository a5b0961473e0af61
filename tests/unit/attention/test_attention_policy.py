"""The choice of a backend: always one that is there, and never against the measurements."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.attention import policy
from rose.attention.base import AttentionSpec, BatchShape
from rose.attention.policy import KNOWN, Cell, PolicyTable, fastest, load_table, load_tables, table_for
from tests.forbidden import forbid

NAMES = ("fa4", "flashinfer-fa3", "flashinfer-fa2", "sdpa")


def spec_of(head_dim: int = 128, heads: int = 16, kv_heads: int = 8, causal: bool = False) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, 0.1, causal, torch.bfloat16, torch.device("cpu"))


def table_of(*cells: tuple[int, int, dict[str, float]], head_dim: int = 128, group: int = 2) -> PolicyTable:
    made = tuple(Cell(head_dim, group, False, tokens, seqs, tuple(us.items())) for tokens, seqs, us in cells)
    return PolicyTable("NVIDIA H200", (9, 0), made)


shapes = st.builds(
    BatchShape, st.integers(0, 1 << 20), st.integers(1, 4096), st.integers(1, 1 << 17)
)  # fmt: skip
shipped = load_tables([Path(policy.__file__).parent])


@given(
    shape=shapes,
    available=st.sets(st.sampled_from(NAMES), min_size=1),
    head_dim=st.sampled_from((32, 64, 128)),
)
def test_the_choice_is_always_available(shape: BatchShape, available: set[str], head_dim: int) -> None:
    for table in (None, *shipped):
        assert fastest(table, spec_of(head_dim), shape, available) in available


def test_a_table_ships_for_the_h200_and_serves_its_sisters() -> None:
    table = table_for("NVIDIA H200", (9, 0), shipped)
    assert table is not None
    assert table.device == "NVIDIA H200"
    assert table_for("NVIDIA H100 80GB HBM3", (9, 0), shipped) is table
    assert table_for("NVIDIA A100-SXM4-80GB", (8, 0), shipped) is None


def test_the_measured_batch_gets_its_fastest_backend() -> None:
    for table in shipped:
        for cell in table.cells:
            spec = replace(spec_of(cell.head_dim, 16, 16 // cell.group, cell.causal), fp8=True)
            shape = BatchShape(cell.num_tokens, cell.num_seqs, cell.num_tokens)
            assert fastest(table, spec, shape, KNOWN) == min((us, name) for name, us in cell.us)[1]


def test_fp8_is_for_models_that_have_it_and_for_batches_where_it_was_measured_to_win() -> None:
    many, few = {"fa4": 2.0, "flashinfer-fa3-fp8": 1.0}, {"fa4": 1.0, "flashinfer-fa3-fp8": 2.0}
    table = table_of((8192, 16, many), (128, 1, few))
    names = ("fa4", "flashinfer-fa3-fp8", "sdpa")
    bulk, single = BatchShape(8192, 16, 512), BatchShape(128, 1, 128)
    fp8 = replace(spec_of(), fp8=True)
    assert fastest(table, fp8, bulk, names) == "flashinfer-fa3-fp8"
    assert fastest(table, fp8, single, names) == "fa4"
    assert fastest(table, spec_of(), bulk, names) == "fa4"
    assert fastest(None, fp8, bulk, names) == "fa4"  # what nobody measured


def test_without_the_fastest_the_next_best_measured_one_serves() -> None:
    table = table_of((512, 1, {"fa4": 1.0, "sdpa": 2.0, "flashinfer-fa2": 3.0}))
    shape = BatchShape(512, 1, 512)
    assert fastest(table, spec_of(), shape, {"flashinfer-fa2", "sdpa"}) == "sdpa"


def test_a_cell_that_measured_none_of_the_available_is_passed_over() -> None:
    table = table_of((512, 1, {"fa4": 1.0}), (64, 1, {"sdpa": 5.0, "flashinfer-fa2": 4.0}))
    assert fastest(table, spec_of(), BatchShape(512, 1, 512), {"flashinfer-fa2", "sdpa"}) == "flashinfer-fa2"


def test_along_growing_tokens_the_choice_changes_once() -> None:
    table = table_of((128, 1, {"fa4": 1.0, "sdpa": 2.0}), (8192, 1, {"fa4": 2.0, "sdpa": 1.0}))
    chosen = [
        fastest(table, spec_of(), BatchShape(tokens, 1, tokens), ["fa4", "sdpa"])
        for tokens in range(1, 20_000, 7)
    ]
    changes = [i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]]
    assert chosen[0] == "fa4"
    assert chosen[-1] == "sdpa"
    assert len(changes) == 1
    assert 1 + 7 * changes[0] == pytest.approx(1024, abs=8)  # half way, counted in doublings


def test_equal_tokens_are_told_apart_by_the_number_of_sequences() -> None:
    table = table_of((4096, 1, {"fa4": 1.0, "sdpa": 2.0}), (4096, 256, {"fa4": 2.0, "sdpa": 1.0}))
    assert fastest(table, spec_of(), BatchShape(4096, 2, 2048), ["fa4", "sdpa"]) == "fa4"
    assert fastest(table, spec_of(), BatchShape(4096, 200, 21), ["fa4", "sdpa"]) == "sdpa"


def test_an_unmeasured_head_dim_takes_flashinfer_if_there_and_else_torch() -> None:
    table, shape = table_of((512, 1, {"sdpa": 1.0, "flashinfer-fa3": 2.0})), BatchShape(512, 1, 512)
    assert fastest(table, spec_of(96), shape, NAMES) == "flashinfer-fa3"
    assert fastest(table, spec_of(96), shape, {"flashinfer-fa2", "sdpa"}) == "flashinfer-fa2"
    assert fastest(None, spec_of(), shape, {"sdpa"}) == "sdpa"
    assert fastest(None, spec_of(), shape, {"home-made"}) == "home-made"


def test_cells_of_the_same_mask_and_group_go_first() -> None:
    full, shape = Cell(128, 2, False, 512, 1, (("fa4", 1.0), ("sdpa", 2.0))), BatchShape(512, 1, 512)
    causal = Cell(128, 2, True, 64, 1, (("fa4", 2.0), ("sdpa", 1.0)))
    wide = Cell(128, 4, False, 64, 1, (("fa4", 2.0), ("sdpa", 1.0)))
    table = PolicyTable("x", (9, 0), (full, causal, wide))
    assert fastest(table, spec_of(), shape, ["fa4", "sdpa"]) == "fa4"
    assert fastest(table, spec_of(causal=True), shape, ["fa4", "sdpa"]) == "sdpa"
    assert fastest(table, spec_of(heads=32), shape, ["fa4", "sdpa"]) == "sdpa"


def test_nothing_available_is_an_error() -> None:
    with pytest.raises(ValueError, match="no attention backend"):
        policy.choose(spec_of(), BatchShape(1, 1, 1), [])


def test_a_window_excludes_every_backend_without_windows() -> None:
    spec = replace(spec_of(), window=64)
    table, shape = (
        table_of((512, 1, {"fa4": 1.0, "flashinfer-fa3": 2.0, "sdpa": 9.0})),
        BatchShape(512, 1, 512),
    )
    assert fastest(table, spec, shape, NAMES) == fastest(None, spec, shape, NAMES) == "sdpa"
    with pytest.raises(ValueError, match="no attention backend"):
        fastest(table, spec, shape, ["fa4", "flashinfer-fa2"])


@pytest.mark.parametrize(("heads", "most"), [(16, 528), (12, 704), (32, 264)])
def test_small_blocks_serve_only_batches_whose_blocks_all_run_at_once(heads: int, most: int) -> None:
    far = (64, 1, {"fa4": 1.0, "flat": 2.0})
    table = table_of((512, 1, {"fa4-64x128-early": 1.0, "flat": 2.0, "fa4": 3.0}), far)
    spec = spec_of(heads=heads, kv_heads=heads)
    assert fastest(table, spec, BatchShape(most, 1, most), KNOWN) == "fa4-64x128-early"
    assert fastest(table, spec, BatchShape(most + 1, 1, most + 1), KNOWN) == "fa4"


@pytest.mark.parametrize("shape", [(512, 1), (512, 4), (640, 1), (1024, 2), (1024, 1)])
def test_the_shipped_table_takes_small_blocks_up_to_512_tokens(shape: tuple[int, int]) -> None:
    num_tokens, num_seqs = shape
    for spec in (spec_of(), spec_of(64, 16, 16)):
        chosen = fastest(shipped[0], spec, BatchShape(num_tokens, num_seqs, num_tokens), KNOWN)
        assert chosen == ("fa4-64x128-early" if num_tokens == 512 else "chained")


def test_choose_takes_the_dict_of_backends() -> None:
    assert policy.choose(spec_of(), BatchShape(512, 4, 128), {"sdpa": object()}) == "sdpa"


def write(path: Path, **changes: object) -> Path:
    entry = {
        "head_dim": 128, "num_heads": 16, "num_kv_heads": 8, "causal": False,
        "num_tokens": 512, "num_seqs": 1,
        "us": {"fa4": 100, "flashinfer-fa2": 90},
    }  # fmt: skip
    document = {"format": 1, "device": "NVIDIA X", "capability": [9, 0], "cells": [entry], **changes}
    path.write_text(json.dumps(document))
    return path


def test_a_table_is_read_as_it_was_measured(tmp_path: Path) -> None:
    table = load_table(write(tmp_path / "policy.json"))
    assert dict(table.cells[0].us) == {"fa4": 100.0, "flashinfer-fa2": 90.0}
    assert fastest(table, spec_of(), BatchShape(512, 1, 512), NAMES) == "flashinfer-fa2"


@pytest.mark.parametrize("changes", [{"format": 2}, {"cells": [{"us": {}}]}, {"capability": 9}, {"cells": 7}])
def test_a_bad_table_names_its_file(tmp_path: Path, changes: dict[str, object]) -> None:
    path = write(tmp_path / "policy.json", **changes)
    with pytest.raises(ValueError, match=r"policy\.json"):
        load_table(path)


def test_a_bad_table_is_ignored_with_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "policy_a.json")
    (tmp_path / "policy_b.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        tables = load_tables([tmp_path])
    assert [table.device for table in tables] == ["NVIDIA X"]
    assert "policy_b.json" in caplog.text


def test_a_cache_of_another_user_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forbid(monkeypatch, tmp_path)
    assert load_tables() == shipped
