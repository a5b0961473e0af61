"""The event loop's own code, compiled ahead of time: its modules, where they lie, how they are imported.

A request's way through gateway, scheduler and engine is Python, a few thousand lines that no device speeds
up. mypyc compiles them to a shared object: `python -m rose.aot.build_loop`. A process imports that in place
of the sources only if it was built for this Python from exactly the sources that lie here; otherwise all of
them are interpreted. Nothing but the standard library is imported here: all of a server comes after it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from rose.aot.folders import places
from rose.aot.manifest import sha256_of

SUBFOLDER = "loop"
RECORD_NAME = "loop.json"
GROUP = "bouquet_loop"
ROOMS = ("cuda_utils", "gateway", "rose", "scheduler")
# What runs for every request, and what inherits from that: an interpreted class cannot. Not what inherits
# from aiohttp or is a schema of msgspec's: those want classes of the interpreter.
MODULES = (
    "cuda_utils.completion",
    "cuda_utils.lazy_tensor",
    "gateway.cuts",
    "gateway.deadline",
    "gateway.drain",
    "gateway.encoding",
    "gateway.exchange",
    "gateway.inputs",
    "gateway.media",
    "gateway.metrics",
    "gateway.pipeline",
    "gateway.plain_head",
    "gateway.rendering",
    "gateway.replicas.chunks",
    "gateway.routes.openai",
    "rose.batch",
    "rose.buckets",
    "rose.graph_engine",
    "rose.graph_runner",
    "rose.limits",
    "rose.result_layout",
    "rose.runs",
    "rose.staging",
    "rose.step_time",
    "scheduler.admission",
    "scheduler.batcher",
    "scheduler.cost_model",
    "scheduler.inflight",
    "scheduler.job",
    "scheduler.metrics",
    "scheduler.pacing",
    "scheduler.queue",
)
# All of a group's code lies in this one; the other files only name its modules.
_SHARED = f"{GROUP}__mypyc"


class CompiledLoop:
    """Finds MODULES among the files of `folder`, and nothing else; a `sys.meta_path` finder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if name != _SHARED and name not in MODULES:
            return None
        file = str(file_of(self._folder, name))
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def use_compiled_loop(folders: Iterable[Path] | None = None) -> str:
    """Have the loop's modules imported as they were built in one of `folders` (default: where kernels lie).

    Returns "compiled", or why nothing changes: "interpreted: ...".
    """
    why_not = "interpreted: not built"
    if any(name in sys.modules for name in MODULES):
        return "interpreted: imported already"
    for folder in places() if folders is None else folders:
        built = built_folder(folder)
        try:
            if not (built / RECORD_NAME).is_file():
                continue
        except OSError as error:  # a home that is another user's; there is no log yet that could say so
            why_not = f"interpreted: {error}"
            continue
        if not is_current(built):
            why_not = "interpreted: built from other sources, or damaged"
            continue
        finder = CompiledLoop(built)
        try:
            _load_shared(finder)
        except ImportError as error:
            why_not = f"interpreted: {error}"
            continue
        sys.meta_path.insert(0, finder)
        return "compiled"
    return why_not


def built_folder(folder: Path) -> Path:
    """Where in `folder` lies what this Python can import."""
    return folder / SUBFOLDER / str(sysconfig.get_config_var("SOABI"))


def file_of(folder: Path, name: str) -> Path:
    """The shared object of the module `name` in a built folder."""
    return folder / (name.replace(".", "/") + str(sysconfig.get_config_var("EXT_SUFFIX")))


def is_current(built: Path) -> bool:
    """Whether `built` was built from the sources that lie here, and nothing of it is gone."""
    try:
        if not all(file_of(built, name).is_file() for name in (_SHARED, *MODULES)):
            return False
        record = json.loads((built / RECORD_NAME).read_text())
        return bool(record["sources"] == digest(source_root()))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def source_root() -> Path:
    """The folder of ROOMS."""
    return Path(__file__).resolve().parents[2]


def digest(root: Path) -> str:
    """Hexadecimal SHA-256 of all rooms' sources: a compiled module holds constants of others too."""
    total = hashlib.sha256()
    for path in sources(root):
        total.update(f"{path.relative_to(root).as_posix()}\n".encode())
        total.update(f"{sha256_of(path)}\n".encode())
    return total.hexdigest()


def sources(root: Path) -> list[Path]:
    """All rooms' Python files below `root`, in a fixed order."""
    return sorted(path for room in ROOMS for path in (root / room).rglob("*.py"))


def _load_shared(finder: CompiledLoop) -> None:
    """Load the code itself, so that what is wrong with it shows before anything relies on it."""
    spec = finder.find_spec(_SHARED)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module {_SHARED}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_SHARED] = module
