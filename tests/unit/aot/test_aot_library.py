"""Kernels on disk: only intact ones for this GPU are used, and each rejection is logged."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from rose.aot.library import KernelLibrary, KernelQuery, runs_on
from rose.aot.manifest import (
    MANIFEST_NAME,
    KernelRecord,
    ManifestError,
    merge,
    read_manifest,
    sha256_of,
    write_manifest,
)
from tests.forbidden import forbid

HOPPER = (9, 0)
QUERY = KernelQuery("fa4", 128, 2, False)


def add_kernel(folder: Path, name: str = "a.so", **changes: object) -> KernelRecord:
    """A file with a record in the folder's manifest; `changes` are made to the record."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(name.encode() * 100)
    record = KernelRecord(
        name, "fa4", 128, 2, False, "bfloat16", "sm_90a", {"cuda": "13.0"}, sha256_of(folder / name), 400
    )
    record = replace(record, **changes)  # type: ignore[arg-type]
    known = read_manifest(folder) if (folder / MANIFEST_NAME).exists() else []
    write_manifest(folder, merge(known, record))
    return record


def test_a_manifest_survives_a_round_trip_and_a_rebuild_replaces(tmp_path: Path) -> None:
    first, second = add_kernel(tmp_path, "b.so"), add_kernel(tmp_path, "a.so", group=None, causal=None)
    assert read_manifest(tmp_path) == [second, first]
    rebuilt = add_kernel(tmp_path, "b.so", arch="sm_80")
    assert read_manifest(tmp_path) == [second, rebuilt]


def test_the_fitting_kernel_is_found(tmp_path: Path) -> None:
    add_kernel(tmp_path, "causal.so", causal=True)
    add_kernel(tmp_path, "full.so")
    add_kernel(tmp_path, "any.so", kernel="flashinfer-fa3", group=None, causal=None)
    library = KernelLibrary([tmp_path], HOPPER)
    assert library.find(QUERY) == tmp_path / "full.so"
    assert library.find(replace(QUERY, causal=True)) == tmp_path / "causal.so"
    assert library.find(KernelQuery("flashinfer-fa3", 128, 7, True)) == tmp_path / "any.so"
    for other in (
        replace(QUERY, head_dim=64), replace(QUERY, group=4), replace(QUERY, dtype="float16"),
        replace(QUERY, kernel="flashinfer-fa2"),
    ):  # fmt: skip
        assert library.find(other) is None


@pytest.mark.parametrize("damage", ["changed", "missing", "other arch"])
def test_a_bad_kernel_is_ignored_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    add_kernel(tmp_path, arch="sm_100a" if damage == "other arch" else "sm_90a")
    if damage == "changed":
        (tmp_path / "a.so").write_bytes(b"something else")
    elif damage == "missing":
        (tmp_path / "a.so").unlink()
    with caplog.at_level(logging.INFO):
        assert KernelLibrary([tmp_path], HOPPER).find(QUERY) is None
    assert f"ignored {tmp_path / 'a.so'}" in caplog.text


def test_a_later_folder_serves_when_the_first_is_damaged(tmp_path: Path) -> None:
    checkout, cache = tmp_path / "checkout", tmp_path / "cache"
    add_kernel(checkout)
    add_kernel(cache)
    library = KernelLibrary([checkout, tmp_path / "not there", cache], HOPPER)
    assert library.find(QUERY) == checkout / "a.so"
    (checkout / "a.so").unlink()
    assert library.find(QUERY) == cache / "a.so"


@pytest.mark.parametrize("found_before", [True, False])
def test_kernels_out_of_reach_are_ignored_with_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found_before: bool
) -> None:
    add_kernel(tmp_path)
    library = KernelLibrary([tmp_path], HOPPER)
    forbid(monkeypatch, tmp_path)
    if not found_before:
        library = KernelLibrary([tmp_path], HOPPER)
    assert len(library.records) == found_before
    assert library.find(QUERY) is None
    (line,) = caplog.messages
    assert line.startswith("ignored") and str(tmp_path) in line and "Permission denied" in line


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 9, "kernels": []}', '{"format": 1, "kernels": [{}]}']
)
def test_an_unreadable_manifest_is_ignored_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)
    with pytest.raises(ManifestError):
        read_manifest(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert KernelLibrary([tmp_path], HOPPER).find(QUERY) is None
    assert str(tmp_path) in caplog.text


def test_a_manifest_cannot_name_a_file_outside_its_folder(tmp_path: Path) -> None:
    add_kernel(tmp_path)
    document = json.loads((tmp_path / MANIFEST_NAME).read_text())
    document["kernels"][0]["file"] = "../a.so"
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(document))
    with pytest.raises(ManifestError, match="plain file name"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("arch", "capability", "expected"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100a", (10, 3), False),
        ("sm_120a", (12, 0), True),
        ("compute_90", (9, 0), False),
    ],
)
def test_which_machine_code_runs_where(arch: str, capability: tuple[int, int], expected: bool) -> None:
    assert runs_on(arch, capability) is expected
