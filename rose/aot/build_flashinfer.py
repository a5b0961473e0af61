"""Compiles one ragged-prefill module of FlashInfer; run in a process of its own.

Upstream builds paged kernels and four mask modes as well. Only ragged attention, full or causal, is used
here, so the others become one-line stubs: 2 heavy kernels instead of 8, a quarter of the time and size.
Source: flashinfer-python 0.7.2.post1, jit/attention/modules.py.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from rose.aot.toolchain import ToolchainError, cuda_home, link_shared, run

UNUSED = re.compile(r"_paged_|_mask_[23]\.cu$")

# The templates that stubs specialise, as flashinfer's batch_prefill{,_sm90,_fp8_sm90}.cu declare them.
FA2_PRELUDE = """\
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/pos_enc.cuh>
#include "batch_prefill_config.inc"
namespace flashinfer {
template <bool S, uint32_t C, uint32_t Q, uint32_t V, PosEncodingMode P, bool F, MaskMode M, typename A,
          typename Params>
cudaError_t BatchPrefillWithPagedKVCacheDispatched(Params, typename Params::DTypeO*, float*, bool,
                                                   cudaStream_t);
template <uint32_t C, uint32_t Q, uint32_t V, PosEncodingMode P, bool F, MaskMode M, typename A,
          typename Params>
cudaError_t BatchPrefillWithRaggedKVCacheDispatched(Params, typename Params::DTypeO*, float*, bool,
                                                    cudaStream_t);
"""
FA3_PRELUDE = """\
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/layout.cuh>
#include <flashinfer/math.cuh>
#include "batch_prefill_sm90_config.inc"
namespace flashinfer {
template <uint32_t Q, uint32_t V, MaskMode M, bool W, bool S, typename A, typename Params>
cudaError_t BatchPrefillWithRaggedKVCacheDispatched(Params&, bool, cudaStream_t);
template <uint32_t Q, uint32_t V, MaskMode M, bool W, bool S, typename A, typename Params>
cudaError_t BatchPrefillWithPagedKVCacheDispatched(Params&, bool, cudaStream_t);
template <uint32_t D, MaskMode M, bool W, bool S, typename A, typename Params>
cudaError_t BatchFP8PrefillWithRaggedKVCacheDispatched(Params&, bool, cudaStream_t);
template <uint32_t D, MaskMode M, bool W, bool S, typename A, typename Params>
cudaError_t BatchFP8PrefillWithPagedKVCacheDispatched(Params&, bool, cudaStream_t);
"""


def stub_source(sources: list[str], prelude: str) -> str:
    """One source that defines every kernel instantiated in `sources` to return cudaErrorNotSupported.

    Raises:
        ToolchainError: a source instantiates nothing, so upstream's layout has changed.
    """
    bodies = []
    for source in sources:
        instantiations = re.findall(r"template (cudaError_t\s+\w+Dispatched\s*<.*?);", source, re.DOTALL)
        if not instantiations:
            raise ToolchainError("unexpected FlashInfer sources: no kernel is instantiated in an unused one")
        custom = "true" if "use_custom_mask = MaskMode::kCustom " in source else "false"
        bodies += [
            f"template <> {text.replace('use_custom_mask', custom)} {{ return cudaErrorNotSupported; }}"
            for text in instantiations
        ]
    return prelude + "\n".join(bodies) + "\n}  // namespace flashinfer\n"


def build(backend: str, head_dim: int, out: Path, jobs: int) -> None:
    """Compile the module of `backend` and link it to `out`; it writes bf16.

    backend: "fa2" or "fa3", whose q, k and v are bf16, or "fa3-fp8", whose are e4m3.
    The environment names the architecture and work folder (FLASHINFER_*), read when flashinfer is imported.
    """
    import torch
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    bf16, i32 = torch.bfloat16, torch.int32
    version, _, fp8 = backend.partition("-")
    dtype = torch.float8_e4m3fn if fp8 else bf16
    spec = gen_batch_prefill_module(
        version, dtype, dtype, bf16, i32, head_dim, head_dim, 0, False, False, False
    )
    unused = [path for path in spec.sources if UNUSED.search(path.name)]
    stub = unused[0].with_name("unused_kernels.cu")
    prelude = FA3_PRELUDE if version == "fa3" else FA2_PRELUDE
    text = stub_source([path.read_text() for path in unused], prelude)
    if not stub.exists() or stub.read_text() != text:  # ninja goes by the time of the last change
        stub.write_text(text)
    kept = [path for path in spec.sources if path not in unused]
    spec = dataclasses.replace(spec, name=f"{spec.name}_ragged", sources=[*kept, stub])
    spec.write_ninja()
    ninja = spec.ninja_path.read_text()
    objects = re.findall(r"^build (\S+\.o):", ninja, re.MULTILINE)
    run(["ninja", "-C", str(spec.build_dir), "-f", str(spec.ninja_path), "-j", str(jobs), *objects])
    link_shared([Path(name) for name in objects], out, cuda_home())


def main() -> None:
    """Arguments: backend, head dimension, output, parallel compilers."""
    build(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))


if __name__ == "__main__":
    main()
