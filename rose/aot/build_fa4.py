"""Compiles one forward kernel of FlashAttention-4; run in a process of its own, without a GPU.

The kernel is traced on fake tensors, exported as an object by the package's own cache, and linked with the
static CuTe runtime, so that the result needs neither the DSL nor Python's version: only tvm_ffi.
Source: flash-attn-4 4.0.0b36, cute/interface.py and cute/cache_utils.py.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from rose.aot.toolchain import ToolchainError, cuda_home, link_shared

# The runtime's only undefined symbol is defined by the Python package; errors reach tvm_ffi without it.
SHIM = 'extern "C" void CuteDSLRT_TVMFFISetRaisedCudaError(void *, int) {}\n'


def compile_object(head_dim: int, group: int, causal: bool, cache: Path) -> Path:
    """Trace and compile the varlen bf16 kernel; the object file in `cache` that holds it.

    The environment names the architecture and the cache folder, read when flash_attn is imported.
    Token and sequence counts, lengths and row strides stay dynamic: the shapes below are arbitrary.
    """
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        kv_heads, tokens = 2, 256

        def heads(count: int) -> torch.Tensor:
            return torch.empty(tokens, count, head_dim, dtype=torch.bfloat16, device="cuda")

        q, k, v, out = heads(kv_heads * group), heads(kv_heads), heads(kv_heads), heads(kv_heads * group)
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        _flash_attn_fwd(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=causal, out=out)
    objects = sorted(cache.glob("*/fwd/*.o"))
    if len(objects) != 1:
        raise ToolchainError(
            f"expected one compiled FlashAttention-4 object in {cache}, found {len(objects)}"
        )
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


def build(head_dim: int, group: int, causal: bool, work: Path, out: Path) -> None:
    """Compile one variant in the folder `work` and link it to `out`."""
    kernel = compile_object(head_dim, group, causal, work)
    shim = work / "shim.cc"
    shim.write_text(SHIM)
    link_shared([shim, kernel, runtime_archive()], out, cuda_home())


def main() -> None:
    """Arguments: head dimension, group, causal (0 or 1), work folder, output."""
    head_dim, group, causal = (int(argument) for argument in sys.argv[1:4])
    build(head_dim, group, bool(causal), Path(sys.argv[4]), Path(sys.argv[5]))


if __name__ == "__main__":
    main()
