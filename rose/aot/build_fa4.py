"""Compiles one forward kernel of FlashAttention-4; run in a process of its own, without a GPU.

The kernel is traced on fake tensors, exported as an object by the package's own cache, and linked with the
static CuTe runtime, so that the result needs neither the DSL nor Python's version: only tvm_ffi.
Source: flash-attn-4 4.0.0b36, cute/interface.py, cute/flash_fwd_sm90.py and cute/cache_utils.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rose.aot.cute import link_cute, the_object
from rose.aot.variants import FlashKernel, KernelVariant


@contextmanager
def launched_early() -> Iterator[None]:
    """Kernels traced inside may come up while the one before still runs (programmatic dependent launch).

    The package's forward kernel does not do so. All its threads pass one barrier before they touch memory;
    behind that they now wait for the kernel before, and then let the next one come up.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.dsl import BaseDSL
    from flash_attn.cute import flash_fwd_sm90

    barrier, launch = flash_fwd_sm90.pipeline_init_wait, BaseDSL.LaunchConfig.__init__

    def barrier_and_wait(*arguments: Any, **options: Any) -> None:
        barrier(*arguments, **options)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    def launch_early(config: Any, *arguments: Any, **options: Any) -> None:
        launch(config, *arguments, **{"use_pdl": True, **options})

    with (
        patch.object(flash_fwd_sm90, "pipeline_init_wait", barrier_and_wait),
        patch.object(BaseDSL.LaunchConfig, "__init__", launch_early),
    ):
        yield


def compile_object(variant: KernelVariant, cache: Path) -> Path:
    """Trace and compile the varlen bf16 kernel; the object file in `cache` that holds it.

    The environment names the architecture and the cache folder, read when flash_attn is imported.
    Token and sequence counts, lengths and row strides stay dynamic: the shapes below are arbitrary.
    """
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        kv_heads, tokens, group = 2, 256, variant.group or 1

        def heads(count: int) -> torch.Tensor:
            return torch.empty(tokens, count, variant.head_dim or 0, dtype=torch.bfloat16, device="cuda")

        q, k, v, out = heads(kv_heads * group), heads(kv_heads), heads(kv_heads), heads(kv_heads * group)
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        _flash_attn_fwd(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=bool(variant.causal), out=out,
            tile_mn=FlashKernel.parse(variant.kernel).tile,
        )  # fmt: skip
    return the_object(cache)


def build(variant: KernelVariant, work: Path, out: Path) -> None:
    """Compile one variant in the folder `work` and link it to `out`."""
    if FlashKernel.parse(variant.kernel).early:
        with launched_early():
            kernel = compile_object(variant, work)
    else:
        kernel = compile_object(variant, work)
    link_cute(kernel, work, out)


def main() -> None:
    """Arguments: kernel, head dimension, group, causal (0 or 1), work folder, output."""
    head_dim, group, causal = (int(argument) for argument in sys.argv[2:5])
    variant = KernelVariant(sys.argv[1], head_dim, group, bool(causal))
    build(variant, Path(sys.argv[5]), Path(sys.argv[6]))


if __name__ == "__main__":
    main()
