"""Every import contract holds, and every one is shown to fail when it is broken.

A copy of the packages gets one forbidden import a test; the linter must name the contract that it breaks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = ("rose", "scheduler", "gateway", "cuda_utils", "loadgen")


@dataclass(frozen=True, slots=True)
class Breach:
    """One line of code at the end of one file, new or not, and the contract that it breaks."""

    contract: str
    file: str
    code: str


BREACHES = (
    Breach("gateway -> scheduler -> rose -> cuda_utils", "scheduler/breach.py", "import gateway"),
    Breach("gateway -> scheduler -> rose -> cuda_utils", "cuda_utils/breach.py", "import rose.batch"),
    Breach("nothing imports server", "gateway/breach.py", "import server"),
    Breach("gateway and scheduler see only the contract of rose", "gateway/breach.py", "import torch"),
    Breach(
        "gateway and scheduler see only the contract of rose", "scheduler/breach.py", "import rose.engine"
    ),
    Breach("gateway and scheduler see only the contract of rose", "gateway/breach.py", "import rose.limits"),
    Breach("the contract of rose stands alone", "rose/errors.py", "import torch"),
    Breach("rose knows no asyncio and no HTTP", "rose/breach.py", "import asyncio"),
    Breach("loadgen is a black box client", "loadgen/breach.py", "import gateway"),
    Breach(
        "third-party kernels only in rose.attention and rose.aot",
        "rose/layers/breach.py",
        "import flashinfer",
    ),
    Breach(
        "third-party kernels only in rose.attention and rose.aot", "rose/kernels/breach.py", "import quack"
    ),
    Breach("files and clusters only in gateway.corpus", "gateway/breach.py", "import ray"),
    Breach("files and clusters only in gateway.corpus", "scheduler/breach.py", "import pyarrow"),
    Breach(
        "a server imports nothing of gateway.corpus", "gateway/routes/breach.py", "import gateway.corpus.plan"
    ),
)


@pytest.fixture(scope="module")
def contracts(repo_root: Path) -> list[dict[str, object]]:
    configured = tomllib.loads((repo_root / "pyproject.toml").read_text())
    found: list[dict[str, object]] = configured["tool"]["importlinter"]["contracts"]
    return found


@pytest.fixture
def copied_tree(repo_root: Path, tmp_path: Path) -> Path:
    """The packages and their configuration, without what is not code."""
    for package in PACKAGES:
        shutil.copytree(
            repo_root / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__", "web", "presets"),
        )
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the linter as `make test` does, on `tree`; its own folder comes first on the module path."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60, check=False)


def test_unbroken_tree_keeps_every_contract(copied_tree: Path, contracts: list[dict[str, object]]) -> None:
    report = lint(copied_tree)
    assert report.returncode == 0, report.stdout
    assert f"{len(contracts)} kept, 0 broken" in report.stdout


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: f"{breach.file}: {breach.code}")
def test_a_breach_is_found_and_named(copied_tree: Path, breach: Breach) -> None:
    with (copied_tree / breach.file).open("a") as file:
        file.write(f"{breach.code}\n")
    report = lint(copied_tree)
    assert report.returncode == 1, report.stdout
    assert f"{breach.contract} BROKEN" in " ".join(report.stdout.split())
    assert Path(breach.file).stem in report.stdout


def test_every_contract_has_a_breach(contracts: list[dict[str, object]]) -> None:
    assert {contract["name"] for contract in contracts} == {breach.contract for breach in BREACHES}
