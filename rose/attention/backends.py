"""Brings up the attention backends that can run here, and says in one line which those are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from rose.attention import fa4, flashinfer
from rose.attention.folders import default_folders
from rose.attention.library import KernelLibrary, KernelQuery, load_module
from rose.attention.sdpa import SdpaAttention

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend, AttentionSpec

log = logging.getLogger(__name__)

HOPPER = (9, 0)


def load_backends(
    spec: AttentionSpec, aot_dirs: Collection[Path] | None = None, *, compile_missing: bool = True
) -> dict[str, AttentionBackend]:
    """Every backend that can run `spec` here, by name; torch's own ("sdpa") is always among them.

    Kernels come from `aot_dirs` (default: the checkout's `.aot` and the user cache). Only where those hold
    none, one is compiled from an installed package (`compile_missing`): FlashAttention-4 in seconds, or
    FlashInfer in minutes the first time. What is missing or broken is logged, never raised.
    """
    backends: dict[str, AttentionBackend] = {}
    if spec.device.type == "cuda":
        backends.update(_from_library(spec, default_folders() if aot_dirs is None else aot_dirs))
        if not backends and compile_missing:
            backends.update(_compiled(spec))
    backends["sdpa"] = SdpaAttention(spec)
    heads = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
    log.info("attention on %s, %s: %s", spec.device, heads, ", ".join(backends))
    return backends


def _from_library(spec: AttentionSpec, folders: Collection[Path]) -> dict[str, AttentionBackend]:
    import torch

    library = KernelLibrary(folders, torch.cuda.get_device_capability(spec.device))
    found: dict[str, AttentionBackend] = {}
    missing = []
    for query, make in _makers(spec):
        path = library.find(query)
        if path is None:
            missing.append(query.kernel)
            continue
        try:
            found[query.kernel] = make(path)
        except (ImportError, AttributeError, RuntimeError) as error:
            log.warning("cannot load %s: %s", path, error)
    if missing:
        log.info(
            "no ahead-of-time kernel for %s (python -m rose.attention.aot builds them)", ", ".join(missing)
        )
    return found


def _makers(spec: AttentionSpec) -> list[tuple[KernelQuery, Callable[[Path], AttentionBackend]]]:
    def flash(path: Path) -> AttentionBackend:
        return fa4.Fa4Attention(spec, load_module(path).func)

    def ragged(version: str) -> Callable[[Path], AttentionBackend]:
        return lambda path: flashinfer.FlashInferAttention(spec, version, load_module(path))

    makers: list[tuple[KernelQuery, Callable[[Path], AttentionBackend]]] = [(fa4.query_for(spec), flash)]
    for version, head_dims in flashinfer.HEAD_DIMS.items():
        if spec.head_dim in head_dims:
            makers.append((flashinfer.query_for(spec, version), ragged(version)))
    return makers


def _compiled(spec: AttentionSpec) -> dict[str, AttentionBackend]:
    """The first of the installed packages whose kernel compiles; none is an answer too."""
    import torch

    version = "fa3" if torch.cuda.get_device_capability(spec.device) == HOPPER else "fa2"

    def flash() -> AttentionBackend:
        return fa4.Fa4Attention(spec, fa4.jit_kernel(spec))

    def ragged() -> AttentionBackend:
        return flashinfer.FlashInferAttention(spec, version, flashinfer.jit_module(spec, version))

    attempts: list[tuple[str, Callable[[], AttentionBackend]]] = [(fa4.NAME, flash)]
    if spec.head_dim in flashinfer.HEAD_DIMS[version]:
        attempts.append((f"flashinfer-{version}", ragged))
    for name, make in attempts:
        try:
            backend = make()
        except ImportError as error:
            log.info("%s: not installed (%s)", name, error)
        except Exception as error:  # whatever a compiler may raise; torch's kernels still serve
            log.warning("%s could not be compiled: %s: %s", name, type(error).__name__, error)
        else:
            log.info("%s: compiled from the installed package, since no ahead-of-time kernel was found", name)
            return {name: backend}
    return {}
