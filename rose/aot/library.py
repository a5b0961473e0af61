"""Finds kernels built ahead of time that fit a model and a GPU, and loads them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.aot.manifest import MANIFEST_NAME, KernelRecord, ManifestError, read_manifest, sha256_of

log = logging.getLogger(__name__)

Kernel = Callable[..., object]


@dataclass(frozen=True, slots=True)
class KernelQuery:
    """What a model needs of a kernel; see KernelRecord for the names."""

    kernel: str
    head_dim: int | None = None
    group: int | None = None
    causal: bool | None = None
    dtype: str = "bfloat16"


class KernelLibrary:
    """The kernels of several folders that run on a GPU of one compute capability.

    folders: looked at in order; one without a manifest is skipped silently.
    capability: as `torch.cuda.get_device_capability` gives it.
    """

    def __init__(self, folders: Iterable[Path], capability: tuple[int, int]) -> None:
        self._capability = capability
        self._entries = [(folder, record) for folder in folders for record in _records(folder)]

    def __repr__(self) -> str:
        names = ", ".join(record.file for _, record in self._entries)
        return f"KernelLibrary(sm_{self._capability[0]}{self._capability[1]}: {names or 'no kernels'})"

    @property
    def records(self) -> list[KernelRecord]:
        """What the folders' manifests list, intact or not."""
        return [record for _, record in self._entries]

    def find(self, query: KernelQuery) -> Path | None:
        """The first intact shared object that answers `query`; None, with a log line a rejected file."""
        for folder, record in self._entries:
            if _answers(record, query) and self._usable(folder, record):
                return folder / record.file
        return None

    def _usable(self, folder: Path, record: KernelRecord) -> bool:
        path = folder / record.file
        try:
            if not runs_on(record.arch, self._capability):
                major, minor = self._capability
                log.info("ignored %s: built for %s, this GPU is sm_%d%d", path, record.arch, major, minor)
            elif not path.is_file():
                log.warning("ignored %s: %s lists it, but it is missing", path, MANIFEST_NAME)
            elif sha256_of(path) != record.sha256:
                log.warning("ignored %s: it is not the file that %s describes", path, MANIFEST_NAME)
            else:
                return True
        except OSError as error:
            log.warning("ignored %s: %s", path, error)
        return False


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether machine code for `arch` runs on a GPU of `capability`.

    "sm_90a" runs on 9.0 only, "sm_100f" on 10.0 and later minors, plain "sm_80" likewise on 8.0, 8.6, 8.9.
    Source: CUDA C++ Programming Guide, binary compatibility and feature sets.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    major, minor, suffix = int(match[1]), int(match[2]), match[3]
    if suffix == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def load_module(path: Path) -> Any:
    """Load a shared object; its exported functions are attributes.

    Raises:
        ImportError: apache-tvm-ffi is not installed.
        RuntimeError: the file cannot be loaded, by a missing library for one.
    """
    import tvm_ffi

    return tvm_ffi.load_module(str(path))


def _records(folder: Path) -> list[KernelRecord]:
    try:
        return read_manifest(folder) if (folder / MANIFEST_NAME).exists() else []
    except (OSError, ManifestError) as error:
        log.warning("ignored the kernels of %s: %s", folder, error)
        return []


def _answers(record: KernelRecord, query: KernelQuery) -> bool:
    return (
        record.kernel == query.kernel
        and record.head_dim == query.head_dim
        and record.dtype == query.dtype
        and record.group in (None, query.group)
        and record.causal in (None, query.causal)
    )
