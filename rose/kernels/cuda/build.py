"""The command `python -m rose.kernels.cuda.build`: compile the CUDA C++ kernels ahead of time.

Needs nvcc 13.0 or later; no GPU. Takes seconds a source.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rose.aot.folders import default_output
from rose.aot.toolchain import ToolchainError, cuda_home, cuda_version, run
from rose.kernels.cuda.cubin import SOURCES, CudaSource, write_record

# wgmma exists in the target with the "a" only.
_TARGET = "-gencode=arch=compute_90a,code=sm_90a"


def build(source: CudaSource, out: Path) -> Path:
    """Compile `source` into the folder `out`; the cubin.

    Raises:
        ToolchainError: nvcc is missing or failed.
    """
    home = cuda_home()
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f".{source.cubin_name}.partial"
    nvcc = str(home / "bin" / "nvcc")
    run([nvcc, "-O3", "-std=c++17", _TARGET, "-cubin", str(source.path), "-o", str(partial)])
    cubin = out / source.cubin_name
    partial.replace(cubin)
    write_record(source, out, {"cuda": cuda_version(home)})
    return cubin


def main(argv: Sequence[str] | None = None) -> int:
    """Build; 0 if it went well."""
    parser = argparse.ArgumentParser(prog="python -m rose.kernels.cuda.build", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=default_output(), help="folder to write (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    for source in SOURCES:
        try:
            cubin = build(source, arguments.out)
        except ToolchainError as error:
            sys.stderr.write(f"{source.cubin_name}: FAILED: {error}\n")
            return 1
        sys.stdout.write(f"{cubin}: {cubin.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
