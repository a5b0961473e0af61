"""Links what the CuTe DSL compiles into shared objects that need neither the DSL nor a Python version."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rose.aot.toolchain import ToolchainError, cuda_home, link_shared

# The runtime's only undefined symbol is defined by the Python package; errors reach tvm_ffi without it.
SHIM = 'extern "C" void CuteDSLRT_TVMFFISetRaisedCudaError(void *, int) {}\n'


def the_object(cache: Path) -> Path:
    """The one compiled object in a package's cache folder.

    Raises:
        ToolchainError: there is none, or more than one.
    """
    objects = sorted(cache.rglob("*.o"))
    if len(objects) != 1:
        raise ToolchainError(f"expected one compiled object in {cache}, found {len(objects)}")
    return objects[0]


def runtime_archive() -> Path:
    """The static CuTe runtime for CUDA 13 (its cudaDeviceProp layout differs from 12's).

    Raises:
        ToolchainError: nvidia-cutlass-dsl is not there, or without its cu13 libraries.
    """
    found_package = find_spec("cutlass")
    if found_package is None or found_package.origin is None:
        raise ToolchainError("nvidia-cutlass-dsl is not installed")
    name = "libcuda_dialect_runtime_static.a"
    root = Path(found_package.origin).resolve().parents[2]
    found = sorted(path for path in root.rglob(name) if "cu13" in str(path) or "cuda13" in str(path))
    if not found:
        raise ToolchainError(f"no {name} for CUDA 13 under {root}; install nvidia-cutlass-dsl[cu13]")
    return found[0]


def link_cute(kernel: Path, work: Path, out: Path) -> None:
    """Link the object `kernel` with the CuTe runtime to `out`; its function is called `func`. work: a folder.

    Raises:
        ToolchainError: the runtime or a compiler is missing, or linking failed.
    """
    shim = work / "shim.cc"
    shim.write_text(SHIM)
    link_shared([shim, kernel, runtime_archive()], out, cuda_home())
