"""FlashInfer's ragged prefill, fa2 and fa3: a plan on the host for every batch, then one kernel a layer.

`plan` fills a page-locked buffer with the work list and copies it to the device on the current stream. The
copy may still be queued when the next batch is planned, so each in-flight slot has a page-locked buffer of
its own; the device's buffer is ordered by the stream and shared. In CUDA-graph mode the layout of the list
depends on the token and sequence counts alone, so a captured forward is replayed with other lengths after
planning anew. Splitting of keys is off: forced on in graph mode, it costs up to a gigabyte of partial
results and a second kernel, and 0.7.2 made graphs safe without it.

As with fa4, key and value rows past the end of a sequence may be fetched with weight zero: keep them finite.
Source: flashinfer-python 0.7.2.post1, prefill.py (BatchPrefillWithRaggedKVCacheWrapper.plan and .run),
data/include/flashinfer/attention/scheduler.cuh (PrefillPlan, PrefillSM90Plan).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rose.aot.library import KernelQuery

if TYPE_CHECKING:
    import torch

    from rose.attention.base import AttentionSpec
    from rose.batch import Int32

# Upstream's size. fa3 lists at most 4096 tiles a head of 28 bytes: enough for 72 heads.
WORKSPACE_BYTES = 8 << 20
FULL, CAUSAL = 0, 1
NHD_LAYOUT, NO_WINDOW, NO_PDL = 0, -1, False
HEAD_DIMS = {"fa2": (64, 128, 256), "fa3": (64, 128, 256)}


def query_for(spec: AttentionSpec, version: str) -> KernelQuery:
    """What `spec` needs of `version` ("fa2", "fa3")."""
    group = spec.num_heads // spec.num_kv_heads
    dtype = str(spec.dtype).removeprefix("torch.")
    return KernelQuery(f"flashinfer-{version}", spec.head_dim, group, spec.causal, dtype)


class FlashInferAttention:
    """One module of FlashInfer, called below its Python wrapper.

    version: "fa2" or "fa3". module: its `plan` and `ragged_run`.
    slots: batches that may be in flight at a time; locking pages while serving would take milliseconds.
    """

    capturable = True
    plans = True

    def __init__(self, spec: AttentionSpec, version: str, module: Any, slots: int = 1) -> None:
        import torch

        self.name = f"flashinfer-{version}"
        self._spec = spec
        self._plan = module.plan
        self._run = module.ragged_run
        self._plan_tail = (-1, True, 0, 0) if version == "fa2" else ()  # no fixed split, no split, -, -
        self._run_tail = _fa2_tail(spec.scale) if version == "fa2" else _fa3_tail(spec.scale)
        self._plan_info: object = None
        on_gpu = spec.device.type == "cuda"
        self._pinned = [
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(slots)
        ]
        self._int_workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        # Partial results of split keys, which are off; only its device is read.
        self._float_workspace = torch.empty(16, dtype=torch.uint8, device=spec.device)

    def plan(self, host_cu_seqlens: Int32, num_tokens: int, slot: int) -> None:
        """Make the work list of a batch and queue its copy on the current stream, ahead of `forward`.

        Raises:
            RuntimeError: the list does not fit the workspace.
        """
        import torch

        spec = self._spec
        offsets = torch.from_numpy(host_cu_seqlens)
        lengths = torch.from_numpy(np.diff(host_cu_seqlens))
        self._plan_info = self._plan(
            self._float_workspace, self._int_workspace, self._pinned[slot],
            offsets, offsets, lengths,
            num_tokens, len(host_cu_seqlens) - 1, spec.num_heads, spec.num_kv_heads,
            1,  # page size
            True,  # CUDA-graph mode
            spec.head_dim, spec.head_dim, spec.causal, NO_WINDOW,
            *self._plan_tail,
        )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> None:
        """As AttentionBackend.forward, for the batch planned last; max_seqlen is not needed."""
        self._run(
            self._float_workspace, self._int_workspace, self._plan_info,
            q, k, v, cu_seqlens, cu_seqlens, out,
            None,  # log-sum-exp
            CAUSAL if self._spec.causal else FULL, NHD_LAYOUT, NO_WINDOW, NO_PDL,
            *self._run_tail,
        )  # fmt: skip


def _fa2_tail(scale: float) -> tuple[object, ...]:
    tensors = (None,) * 8  # mask, its offsets, alibi, prefix, positions, longest item, key and value factors
    return (*tensors, 0.0, scale, 1.0, 1e-4, 0)  # soft cap, scale, 1 / rope factor, 1 / rope base, -


def _fa3_tail(scale: float) -> tuple[object, ...]:
    return (
        None,
        None,
        None,
        None,
        0.0,
        scale,
        1.0,
        0,
    )  # prefix, positions, item, factor; cap, scale, factor, -


def jit_module(spec: AttentionSpec, version: str) -> Any:
    """The module from the installed package, which compiles it with nvcc unless it did before (minutes).

    Raises:
        ImportError: flashinfer-python is not installed.
        Exception: whatever the build raises, for want of nvcc for one.
    """
    import torch
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    dtypes = (spec.dtype, spec.dtype, spec.dtype, torch.int32)
    flags = (0, False, False, False)  # no position encoding, window, soft cap, fp16 products
    return gen_batch_prefill_module(version, *dtypes, spec.head_dim, spec.head_dim, *flags).build_and_load()
