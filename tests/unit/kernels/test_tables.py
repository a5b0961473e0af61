"""A table that a tuner wrote is the one that a server reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.kernels import fused, gemm
from rose.kernels.tables import in_use, read_choices, users_own, write_choices
from tests.forbidden import forbid

CHOICES: list[dict[str, object]] = [{"n": 64, "kernel": None, "us": 1.5}, {"n": 8, "kernel": "a", "us": 2.0}]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_choices(path, 'NVIDIA "H200"', CHOICES)
    assert read_choices(path) == CHOICES
    assert len(path.read_text().splitlines()) == 6 + len(CHOICES) - 1  # a choice a line


@pytest.mark.parametrize("path", [gemm.TABLE_PATH, fused.TABLE_PATH], ids=lambda path: path.stem)
def test_the_shipped_tables_are_as_they_would_be_written(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    write_choices(again, "NVIDIA H200", read_choices(path))
    assert again.read_text() == path.read_text()


def test_the_users_own_table_is_read_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = users_own(gemm.TABLE_PATH)
    assert own == tmp_path / "bouquet" / "gemm_h200.json"
    shipped = dict(gemm.table_in_use(skinny=False))
    assert shipped == gemm.read_table(gemm.TABLE_PATH)
    write_choices(own, "A GPU", [{"n": 64, "k": 64, "ending": "sum", "max_m": 16, "plan": None}])
    assert gemm.table_in_use(skinny=False) == {(64, 64, "sum"): [gemm.GemmChoice(16, None)]}
    for bad in ("{", "[]", '{"choices": [{"n": 1}]}'):
        own.write_text(bad)
        caplog.clear()
        assert gemm.table_in_use(skinny=False) == shipped
        assert str(own) in caplog.text


@pytest.mark.parametrize("out_of_reach", ["", "bouquet"])
def test_a_table_out_of_reach_leaves_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, out_of_reach: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_choices(users_own(gemm.TABLE_PATH), "A GPU", CHOICES)
    forbid(monkeypatch, tmp_path / out_of_reach)
    for path in (gemm.TABLE_PATH, fused.TABLE_PATH):
        assert in_use(path, read_choices) == read_choices(path)
    (line,) = caplog.messages
    assert str(tmp_path / "bouquet") in line and "cannot be read" in line


def test_a_bad_shipped_table_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match=r"none\.json"):
        in_use(tmp_path / "none.json", read_choices)
