"""Finds the CUDA toolkit and links objects into shared objects."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path


class ToolchainError(Exception):
    """A compiler or library is missing or failed. The message says which."""


def cuda_home() -> Path:
    """Root of the CUDA toolkit: $CUDA_HOME, or where nvcc says it lives.

    nvcc is asked (`--dryrun` prints `_HERE_`) rather than its path cut, since /usr/local/bin/nvcc is often
    a wrapper script; FlashInfer cuts the path and then fails to link.

    Raises:
        ToolchainError: no nvcc.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise ToolchainError("no nvcc on PATH; install the CUDA toolkit (13.0 or later) or set CUDA_HOME")
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    dryrun = subprocess.run(command, check=False, capture_output=True, text=True)
    found = re.search(r"_HERE_=(\S+)", dryrun.stderr)
    if found is None:
        raise ToolchainError(f"{nvcc} --dryrun does not say where it lives; set CUDA_HOME")
    return Path(found.group(1)).parent


def cuda_version(home: Path) -> str:
    """Release of the toolkit's nvcc, such as "13.0"."""
    text = run([str(home / "bin" / "nvcc"), "--version"])
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else "unknown"


def library_dir(home: Path) -> Path:
    """Folder of libcudart.so.

    Raises:
        ToolchainError: not found.
    """
    for name in ("lib64", "lib", "targets/x86_64-linux/lib"):
        if (home / name / "libcudart.so").exists():
            return home / name
    raise ToolchainError(f"no libcudart.so under {home}")


def link_shared(objects: list[Path], out: Path, home: Path) -> None:
    """Link objects (and C++ sources) into `out`, against libcudart.

    libcuda is not needed, nor there on a machine without a driver: both kernels ask libcudart for the entry
    points of the driver.
    """
    arguments = ["-O2", "-shared", "-fPIC", "-s", "-o", str(out), *map(str, objects)]
    run(["c++", *arguments, f"-L{library_dir(home)}", "-lcudart", "-ldl"])


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return what it printed.

    Raises:
        ToolchainError: it failed; the message holds the end of its output.
    """
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    if done.returncode:
        raise ToolchainError(f"{Path(command[0]).name} exited {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout
