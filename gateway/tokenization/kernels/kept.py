"""Where machine code is kept between starts: a file a function and signature, which is whole or not there.

numba would keep an index and what it names, written one after the other. Processes that start together, or
are killed meanwhile, could leave an index that gives one signature's code for another's; what is cut off or
half written would fail at every later start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

_PREFIX = "tokenization-"
_STALE_S = 7 * 24 * 3600
_DIGEST_BYTES, _SUFFIX = 32, ".code"


def cache_folder() -> Path | None:
    """Where code of these very sources is, for this Python and processor; None: nothing can be written."""
    processor = cpu_target.target_context.codegen().magic_tuple()
    digest = hashlib.sha256(repr((sys.implementation.cache_tag, numba.__version__, processor)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bouquet"
        folder = home / f"{_PREFIX}{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            os.utime(folder)  # in use
            return folder
    except (OSError, RuntimeError):  # the latter where nothing names a home
        return None


def remove_stale(kept: Path) -> None:
    """Remove the folders of other sources that no process has used for a week."""
    for folder in kept.parent.glob(f"{_PREFIX}{'[0-9a-f]' * 16}"):
        with contextlib.suppress(OSError):
            if folder != kept and time.time() - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


class KeptCode:
    """What a dispatcher of numba's asks for code before it makes any, and gives what it made.

    name: the function's, with its module's. What is not whole is made anew, and a folder that cannot be
    written any more keeps nothing.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.cache_path = str(folder)
        self._folder = folder
        self._name = name

    def load_overload(self, signature: object, context: Any) -> Any:
        """The CompileResult of a signature; None: it is not kept."""
        context.refresh()
        with contextlib.suppress(OSError):
            kept = self._path(signature).read_bytes()
            digest, code = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return CompileResult._rebuild(context, *pickle.loads(code))
        return None

    def save_overload(self, signature: object, made: Any) -> None:
        """Keep the CompileResult of a signature."""
        code, path = dumps(made._reduce()), self._path(signature)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(hashlib.sha256(code).digest() + code)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _path(self, signature: object) -> Path:
        digest = hashlib.sha256(repr(signature).encode()).hexdigest()
        return self._folder / f"{self._name}-{digest[:16]}{_SUFFIX}"


def is_kept(module: str) -> bool:
    """Whether the machine code of `encode` in the kernels' `module` is kept, or none can be."""
    return FOLDER is None or any(FOLDER.glob(f"{module}.encode-*{_SUFFIX}"))


FOLDER = cache_folder()
if FOLDER is not None:
    remove_stale(FOLDER)
