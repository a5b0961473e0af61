"""The unit is one that systemd takes, and lets little out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment import files

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
# systemd's own scale, from 0 to 10; 2 and less is "OK" to it.
MOST_EXPOSED = 2


@pytest.fixture(params=[False, True], ids=["cpu", "cuda"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The unit over this checkout, with or without the drop-in."""
    text = (files.FOLDER / files.UNIT).read_text()
    python = f"{files.unit()['Service']['WorkingDirectory']}/.venv/bin/python"
    assert python in text
    path = tmp_path / "bouquet.service"
    path.write_text(text.replace(python, sys.executable))
    if request.param:
        folder = tmp_path / "bouquet.service.d"
        folder.mkdir()
        shutil.copy(files.FOLDER / "systemd" / "cuda.conf", folder)
    return path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run([ANALYZE, *arguments], check=False, capture_output=True, text=True, timeout=30)


@needs_systemd
def test_systemd_finds_nothing_wrong(unit: Path) -> None:
    done = analyze("verify", "--recursive-errors=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_systemd_is_really_asked(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSystem=very"))
    assert "protect system value" in analyze("verify", "--recursive-errors=no", str(unit)).stderr


@needs_systemd
def test_little_is_exposed(unit: Path) -> None:
    done = analyze("security", "--offline=yes", f"--threshold={10 * MOST_EXPOSED}", str(unit))
    assert done.returncode == 0, done.stdout[-200:]


def test_all_that_is_written_lies_in_the_cache_of_the_unit() -> None:
    service = files.unit()["Service"]
    own = f"/cache/{service['CacheDirectory']}"
    folders = {
        key: value for key, value in files.unit_environment({"%C": "/cache"}).items() if key.endswith("_HOME")
    }
    # The server's own cache is the folder `bouquet` in the first.
    assert folders.pop("XDG_CACHE_HOME") == own.rpartition("/")[0]
    assert folders
    assert all(value.startswith(f"{own}/") for value in folders.values())
