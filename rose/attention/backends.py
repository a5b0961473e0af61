"""Brings up the attention backends that can run here, and says in one line which those are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rose.aot.folders import default_folders
from rose.aot.library import KernelLibrary, KernelQuery, load_module
from rose.attention import chained, fa4, flashinfer, flat
from rose.attention.base import begin, input_dtype
from rose.attention.sdpa import SdpaAttention
from rose.attention.work_list import ListMemory
from rose.kernels import dispatch
from rose.kernels.cuda.chained_attention import ChainedKernels
from rose.kernels.cuda.cubin import CHAINED_ATTENTION
from rose.kernels.cuda.library import cuda_library

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend, AttentionSpec

log = logging.getLogger(__name__)

HOPPER = (9, 0)
TENSOR_CORE_DTYPES = (torch.bfloat16, torch.float16)


def load_backends(
    spec: AttentionSpec,
    aot_dirs: Collection[Path] | None = None,
    *,
    compile_missing: bool = True,
) -> dict[str, AttentionBackend]:
    """Every backend that can run `spec` here, by name; torch's own ("sdpa") is always among them.

    Kernels come from `aot_dirs` (default: the checkout's `.aot` and the user cache). Only where those hold
    none, one is compiled from an installed package (`compile_missing`): FlashAttention-4 in seconds, or
    FlashInfer in minutes the first time, but in FP8 none. None of these has windows. What is missing or
    broken is only logged.
    """
    backends: dict[str, AttentionBackend] = {}
    if spec.device.type == "cuda" and spec.dtype in TENSOR_CORE_DTYPES and spec.window is None:
        backends.update(_from_library(spec, default_folders() if aot_dirs is None else aot_dirs))
        if not backends and compile_missing:
            backends.update(_compiled(spec))
        backends.update(_flat(spec))
        backends.update(_chained(spec, None if aot_dirs is None else tuple(aot_dirs)))
    backends["sdpa"] = SdpaAttention(spec)
    heads = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
    log.info("attention on %s, %s: %s", spec.device, heads, ", ".join(backends))
    return backends


def _from_library(spec: AttentionSpec, folders: Collection[Path]) -> dict[str, AttentionBackend]:
    library = KernelLibrary(folders, torch.cuda.get_device_capability(spec.device))
    found: dict[str, AttentionBackend] = {}
    missing = []
    for query, make in _makers(spec):
        path = library.find(query)
        if path is None:
            if query.kernel != fa4.SMALL:  # nobody goes without for lack of it
                missing.append(query.kernel)
            continue
        try:
            found[query.kernel] = _proven(make(path), spec)
        except Exception as error:  # whatever a damaged or unfit kernel raises; torch's still serve
            log.warning("cannot use %s: %s: %s", path, type(error).__name__, error)
    if missing:
        log.info("no kernel built for %s (python -m rose.aot builds them)", ", ".join(missing))
    return found


def _makers(spec: AttentionSpec) -> list[tuple[KernelQuery, Callable[[Path], AttentionBackend]]]:
    def flash(build: str) -> Callable[[Path], AttentionBackend]:
        return lambda path: fa4.Fa4Attention(spec, load_module(path).func, build)

    def ragged(version: str) -> Callable[[Path], AttentionBackend]:
        return lambda path: flashinfer.FlashInferAttention(spec, version, load_module(path))

    def ragged_fp8(path: Path) -> AttentionBackend:
        return flashinfer.FlashInferFp8Attention(spec, load_module(path))

    makers: list[tuple[KernelQuery, Callable[[Path], AttentionBackend]]] = [
        (fa4.query_for(spec, build), flash(build)) for build in (fa4.NAME, fa4.SMALL)
    ]
    for version, head_dims in flashinfer.HEAD_DIMS.items():
        if spec.head_dim in head_dims and dispatch.has_triton():
            makers.append((flashinfer.query_for(spec, version), ragged(version)))
    if spec.fp8 and spec.head_dim in flashinfer.FP8_HEAD_DIMS and dispatch.has_triton():
        makers.append((flashinfer.query_for(spec, flashinfer.FP8), ragged_fp8))
    return makers


def _compiled(spec: AttentionSpec) -> dict[str, AttentionBackend]:
    """The first of the installed packages whose kernel compiles; none is an answer too."""
    version = "fa3" if torch.cuda.get_device_capability(spec.device) == HOPPER else "fa2"

    def flash() -> AttentionBackend:
        return fa4.Fa4Attention(spec, fa4.jit_kernel(spec))

    def ragged() -> AttentionBackend:
        return flashinfer.FlashInferAttention(spec, version, flashinfer.jit_module(spec, version))

    attempts: list[tuple[str, Callable[[], AttentionBackend]]] = [(fa4.NAME, flash)]
    if spec.head_dim in flashinfer.HEAD_DIMS[version] and dispatch.has_triton():
        attempts.append((f"flashinfer-{version}", ragged))
    for name, make in attempts:
        try:
            backend = _proven(make(), spec)
        except ImportError as error:
            log.info("%s: not installed (%s)", name, error)
        except Exception as error:  # whatever a compiler may raise; torch's kernels still serve
            log.warning("%s could not be compiled: %s: %s", name, type(error).__name__, error)
        else:
            log.info("%s: compiled from the installed package, since no built kernel was found", name)
            return {name: backend}
    return {}


def _flat(spec: AttentionSpec) -> dict[str, AttentionBackend]:
    """Our own Triton kernels; they serve only where the policy's table has them as the fastest."""
    if not flat.takes(spec) or not dispatch.has_triton():
        return {}
    found: dict[str, AttentionBackend] = {}
    for kind in flat.BACKENDS:
        try:
            found[kind.name] = _proven(kind(spec), spec)
        except Exception as error:  # whatever a compiler may raise; the others serve
            log.warning("%s could not be compiled: %s: %s", kind.name, type(error).__name__, error)
    return found


def _chained(spec: AttentionSpec, folders: tuple[Path, ...] | None) -> dict[str, AttentionBackend]:
    """Our own CUDA kernels for Hopper; like the flat ones they serve only where the table says so."""
    if not chained.takes(spec) or not dispatch.has_triton():
        return {}
    library = cuda_library(CHAINED_ATTENTION, folders)
    if library is None:
        return {}
    kernels = ChainedKernels(library, causal=spec.causal, paired=chained.pairs(spec))
    try:
        return {chained.NAME: _proven(chained.ChainedAttention(spec, kernels), spec)}
    except Exception as error:  # whatever an unfit kernel raises; the others serve
        log.warning("cannot use %s: %s: %s", chained.NAME, type(error).__name__, error)
        return {}


def write_empty_lists(spec: AttentionSpec) -> None:
    """Launch the kernels that write lists of work, so that they are compiled, for backends that take `spec`.

    Raises:
        RuntimeError: torch has no CUDA device.
    """
    lists = [
        flashinfer.list_for(spec, version, 1, 1)
        for version, head_dims in flashinfer.HEAD_DIMS.items()
        if spec.head_dim in head_dims and spec.window is None
    ]
    if chained.takes(spec):
        lists.append(chained.list_for(spec, 1, 1))
    memory = ListMemory("empty", spec.device)
    cu_seqlens = torch.zeros(2, dtype=torch.int32, device=spec.device)
    for made in lists:
        memory.write(made, cu_seqlens)


def _proven(backend: AttentionBackend, spec: AttentionSpec) -> AttentionBackend:
    """`backend`, once it has answered two sequences of one token, whose attention is their own values.

    This also compiles and loads the kernel now, before any graph is captured.

    Raises:
        RuntimeError: the answer is wrong.
        Exception: whatever the kernel raises.
    """
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    qkv = torch.empty(2, sum(heads), spec.head_dim, dtype=spec.dtype, device=spec.device).normal_()
    q, k, v = torch.split(qkv.to(input_dtype(backend, spec)), heads, dim=1)
    out = torch.empty(2, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device).zero_()
    offsets = np.array([0, 1, 2], np.int32)
    cu_seqlens = torch.empty(3, dtype=torch.int32, device=spec.device).copy_(torch.from_numpy(offsets))
    backend.plan(offsets)
    begin(backend, cu_seqlens, 2)
    backend.forward(q, k, v, out, cu_seqlens, 1)
    expected = v.to(spec.dtype).repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
    if not torch.allclose(out, expected, rtol=0.02, atol=0.02):
        raise RuntimeError("attention over one token is not that token's value")
    return backend
