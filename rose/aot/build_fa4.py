"""Compiles one forward kernel of FlashAttention-4; run in a process of its own, without a GPU.

The kernel is traced on fake tensors, exported as an object by the package's own cache, and linked with the
static CuTe runtime, so that the result needs neither the DSL nor Python's version: only tvm_ffi.
Source: flash-attn-4 4.0.0b36, cute/interface.py and cute/cache_utils.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rose.aot.cute import link_cute, the_object


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
    return the_object(cache)


def build(head_dim: int, group: int, causal: bool, work: Path, out: Path) -> None:
    """Compile one variant in the folder `work` and link it to `out`."""
    link_cute(compile_object(head_dim, group, causal, work), work, out)


def main() -> None:
    """Arguments: head dimension, group, causal (0 or 1), work folder, output."""
    head_dim, group, causal = (int(argument) for argument in sys.argv[1:4])
    build(head_dim, group, bool(causal), Path(sys.argv[4]), Path(sys.argv[5]))


if __name__ == "__main__":
    main()
