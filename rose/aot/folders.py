"""Where kernels built ahead of time are written to and looked for."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

# Nothing is found there, and nothing can be written: the home that Debian gives users who have none.
_NO_HOME = Path("/nonexistent")


def checkout_folder() -> Path | None:
    """`.aot` of the source checkout that this package is run from (git ignores it); None if installed."""
    root = Path(__file__).resolve().parents[2]
    return root / ".aot" if (root / "pyproject.toml").exists() else None


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/bouquet`, by default `~/.cache/bouquet`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "bouquet"


def default_output() -> Path:
    """Where the build command writes unless told otherwise."""
    return checkout_folder() or user_cache() / "aot"


def places() -> tuple[Path, ...]:
    """Where a server looks for what was built, in order of preference, whether or not that can be read."""
    checkout = checkout_folder()
    return (user_cache() / "aot",) if checkout is None else (checkout, user_cache() / "aot")


def default_folders() -> tuple[Path, ...]:
    """Those of `places` in which can be looked."""
    return tuple(folder for folder in places() if can_be_read(folder))


@functools.cache
def can_be_read(folder: Path) -> bool:
    """Whether can be looked into `folder`, as into one that is not there; if not, a log line says so, once.

    A container that runs as another user than it was built for has a home that is not its own. Asked of what
    is in there, pathlib raises PermissionError.
    """
    try:
        folder.stat()
        readable = os.access(folder, os.R_OK | os.X_OK)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        readable = False
    if not readable:
        log.warning("passed over %s, which cannot be read: nothing built or measured there is used", folder)
    return readable


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor the list of users names one
        return _NO_HOME
