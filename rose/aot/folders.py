"""Where kernels built ahead of time are written to and looked for."""

from __future__ import annotations

import os
from pathlib import Path


def checkout_folder() -> Path | None:
    """`.aot` of the source checkout that this package is run from (git ignores it); None if installed."""
    root = Path(__file__).resolve().parents[2]
    return root / ".aot" if (root / "pyproject.toml").exists() else None


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/bouquet`, by default `~/.cache/bouquet`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bouquet"


def default_output() -> Path:
    """Where the build command writes unless told otherwise."""
    return checkout_folder() or user_cache() / "aot"


def default_folders() -> tuple[Path, ...]:
    """Folders in which a server looks for kernels, in order of preference."""
    checkout = checkout_folder()
    return (user_cache() / "aot",) if checkout is None else (checkout, user_cache() / "aot")
