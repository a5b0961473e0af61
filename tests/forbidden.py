"""Folders that are another user's, for tests that may run as root, who may read all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have whatever is in `folder` be out of reach, as in a home of mode 0700."""
    stat, access = Path.stat, os.access

    def forbidden_stat(path: Path, **options: Any) -> os.stat_result:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    def forbidden_access(path: Path, mode: int) -> bool:
        return folder not in (path, *path.parents) and access(path, mode)

    monkeypatch.setattr(Path, "stat", forbidden_stat)
    monkeypatch.setattr(os, "access", forbidden_access)
