"""The command `python -m rose.aot`: build attention kernels and fused matrix products ahead of time.

Needs `pip install .[aot]`, a C++ compiler and, for FlashInfer, nvcc 13.0 or later; no GPU. FlashAttention-4
and products take a few seconds a kernel; FlashInfer one to ten minutes a module on one slow core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rose.aot.folders import default_output, user_cache
from rose.aot.manifest import (
    MANIFEST_NAME,
    KernelRecord,
    merge,
    read_manifest,
    sha256_of,
    write_manifest,
)
from rose.aot.products import ProductKernel
from rose.aot.toolchain import ToolchainError, cuda_home, cuda_version, run
from rose.aot.variants import FLASH, GEMM, HOPPER, KERNELS, KernelVariant, select

FA4_PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
GEMM_PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")
FLASHINFER_PACKAGES = ("flashinfer-python", "apache-tvm-ffi")
H200_SMS = "132"  # FA4's selector asks for it; the varlen kernels of sm_90a do not depend on it


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m rose.aot", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=default_output(), help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--kernel", action="append", choices=KERNELS, default=[], help="only this kernel; repeatable"
    )
    parser.add_argument(
        "--head-dim", action="append", type=int, default=[], help="only this size; repeatable"
    )
    parser.add_argument(
        "--product", action="append", type=_product, default=[],
        help="only this product with an epilogue, such as gemm-gelu-128x192-pingpong-2x1; repeatable",
    )  # fmt: skip
    parser.add_argument("--arch", default=HOPPER, help="nvcc's name of the GPU (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="compilers at a time, about 2 GB each"
    )
    parser.add_argument(
        "--work", type=Path, default=user_cache() / "aot-build",
        help="folder of intermediate files; an interrupted build goes on from there (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(argv)


def _product(name: str) -> ProductKernel:
    """The product of that name.

    Raises:
        argparse.ArgumentTypeError: there is none, or another command builds it.
    """
    try:
        kernel = ProductKernel.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if kernel.own:
        raise argparse.ArgumentTypeError(f"python -m rose.kernels.cuda.build builds {name}")
    return kernel


def build_variant(variant: KernelVariant, out: Path, work: Path, jobs: int) -> KernelRecord:
    """Compile one kernel in a process of its own and move it into `out`.

    Raises:
        ToolchainError: a package, compiler or library is missing or failed.
    """
    packages = {FLASH: FA4_PACKAGES, GEMM: GEMM_PACKAGES}.get(variant.family, FLASHINFER_PACKAGES)
    versions = _versions(packages) | {"cuda": cuda_version(cuda_home())}
    scratch = work / variant.file.removesuffix(".so")
    scratch.mkdir(parents=True, exist_ok=True)
    built = scratch / variant.file
    if variant.family == FLASH:
        _build_fa4(variant, scratch, built)
    elif variant.family == GEMM:
        _build_gemm(variant, scratch, built)
    else:
        _build_flashinfer(variant, work, built, jobs)
    target = out / variant.file
    partial = target.with_suffix(".partial")
    shutil.copyfile(built, partial)
    partial.replace(target)
    return KernelRecord(
        file=variant.file, kernel=variant.kernel, head_dim=variant.head_dim, group=variant.group,
        causal=variant.causal, dtype="bfloat16", arch=variant.arch, versions=versions,
        sha256=sha256_of(target), size_bytes=target.stat().st_size,
    )  # fmt: skip


def _build_fa4(variant: KernelVariant, scratch: Path, built: Path) -> None:
    cache = _empty_cache(scratch)
    environment = {
        "FLASH_ATTENTION_ARCH": variant.arch.rstrip("a"),
        "CUTE_DSL_ARCH": variant.arch,
        "FLASH_ATTENTION_NUM_SMS": H200_SMS,
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache),
    }
    shape = [variant.kernel, str(variant.head_dim), str(variant.group), str(int(bool(variant.causal)))]
    _run_builder("build_fa4", [*shape, str(cache), str(built)], environment)


def _build_gemm(variant: KernelVariant, scratch: Path, built: Path) -> None:
    cache = _empty_cache(scratch)
    environment = {
        "QUACK_ARCH": variant.arch.rstrip("a"),
        "CUTE_DSL_ARCH": variant.arch,
        "QUACK_CACHE_ENABLED": "1",
        "QUACK_CACHE_DIR": str(cache),
    }
    _run_builder("build_gemm", [variant.kernel, str(cache), str(built)], environment)


def _empty_cache(scratch: Path) -> Path:
    """A folder in which one compiled object will be found."""
    cache = scratch / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    return cache


def _build_flashinfer(variant: KernelVariant, work: Path, built: Path, jobs: int) -> None:
    purelib = Path(sysconfig.get_paths()["purelib"])
    includes = sorted(path.parent for path in purelib.glob("nvidia/*/include/curand_kernel.h"))
    name = variant.arch.removeprefix("sm_")
    digits, suffix = name.rstrip("af"), name[len(name.rstrip("af")) :]
    environment = {
        "CUDA_HOME": str(cuda_home()),
        "FLASHINFER_CUDA_ARCH_LIST": f"{digits[:-1]}.{digits[-1]}{suffix}",
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(f"-I{path}" for path in includes),
    }
    backend = variant.kernel.removeprefix("flashinfer-")
    _run_builder("build_flashinfer", [backend, str(variant.head_dim), str(built), str(jobs)], environment)


def _run_builder(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    binaries = str(Path(sys.executable).parent)  # ninja, installed beside this interpreter
    path = os.pathsep.join([binaries, os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", f"rose.aot.{module}", *arguments]
    run(command, {**os.environ, **environment, "PATH": path})


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    try:
        return {name: version(name) for name in packages}
    except PackageNotFoundError as error:
        raise ToolchainError(f"{error.name} is not installed; pip install '.[aot]'") from error


def main(argv: list[str] | None = None) -> int:
    """Build what the command line names; 0 if every kernel was built."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    variants = [KernelVariant(product.name, arch=arguments.arch) for product in arguments.product]
    if not variants:
        variants = select(arguments.kernel, arguments.head_dim, arguments.arch)
    if not variants:
        print("no kernel matches; see --help", file=sys.stderr)  # noqa: T201
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for variant in variants:
        started = time.monotonic()
        try:
            record = build_variant(variant, arguments.out, arguments.work, arguments.jobs)
        except ToolchainError as error:
            failed += 1
            print(f"{variant.file}: FAILED: {error}", file=sys.stderr)  # noqa: T201
            continue
        known = read_manifest(arguments.out) if (arguments.out / MANIFEST_NAME).exists() else []
        write_manifest(arguments.out, merge(known, record))
        print(f"{variant.file}: {record.size_bytes} bytes, {time.monotonic() - started:.1f} s", flush=True)  # noqa: T201
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
