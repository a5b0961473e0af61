"""FlashInfer's ragged prefill, fa2, fa3 and fa3 in FP8: a list of work for every batch, a kernel a layer.

The kernel that writes the list (work_list.py) is part of a forward, so a captured one is replayed with
other lengths, and nothing is planned on the host. Splitting of keys is off: forced on in graph mode, it costs
up to a gigabyte of partial results and a second kernel, and 0.7.2 made graphs safe without it.

As with fa4, key and value rows past the end of a sequence may be fetched with weight zero: keep them finite.
Source: flashinfer-python 0.7.2.post1, prefill.py (BatchPrefillWithRaggedKVCacheWrapper.run).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rose.aot.library import KernelQuery
from rose.attention.work_list import FA3_ROWS, Fa2List, Fa3List, ListMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rose.attention.base import AttentionSpec
    from rose.batch import Int32

FULL, CAUSAL = 0, 1
NHD_LAYOUT, NO_WINDOW, NO_PDL = 0, -1, False
HEAD_DIMS = {"fa2": (64, 128, 256), "fa3": (64, 128, 256)}
# fa3 with q, k and v in e4m3. Its tiles of queries are fa3's.
FP8 = "fa3-fp8"
FP8_HEAD_DIMS = (128,)


def query_for(spec: AttentionSpec, version: str) -> KernelQuery:
    """What `spec` needs of `version` ("fa2", "fa3", "fa3-fp8")."""
    group = spec.num_heads // spec.num_kv_heads
    dtype = str(spec.dtype).removeprefix("torch.")
    return KernelQuery(f"flashinfer-{version}", spec.head_dim, group, spec.causal, dtype)


def list_for(spec: AttentionSpec, version: str, num_tokens: int, num_seqs: int) -> Fa2List | Fa3List:
    """What `version` needs for batches of so many tokens and sequences, padding included."""
    if version == "fa2":
        return Fa2List.of(spec, num_tokens, num_seqs)
    import torch

    blocks = torch.cuda.get_device_properties(spec.device).multi_processor_count
    return Fa3List.of(spec, FA3_ROWS[spec.head_dim], num_tokens, num_seqs, blocks)


class FlashInferAttention:
    """One module of FlashInfer, called below its Python wrapper. It needs Triton.

    version: "fa2", "fa3" or "fa3-fp8". module: its `ragged_run`.
    """

    capturable = True
    plans = False

    def __init__(self, spec: AttentionSpec, version: str, module: Any) -> None:
        import torch

        self.name = f"flashinfer-{version}"
        self._spec = spec
        self._run = module.ragged_run
        self._run_tail = {"fa2": _fa2_tail, "fa3": _fa3_tail, FP8: _fp8_tail}[version](spec.scale)
        self._version = version
        self._mask = CAUSAL if spec.causal else FULL
        self._info: tuple[int, ...] = ()
        self._list = ListMemory(self.name, spec.device)
        # Partial results of split keys, which are off; only its device is read.
        self._float_workspace = torch.empty(16, dtype=torch.uint8, device=spec.device)

    def plan(self, host_cu_seqlens: Int32) -> None:
        """Nothing: the device lists the work."""

    def write_list(self, cu_seqlens: torch.Tensor, num_tokens: int) -> None:
        """See ListedAttention.write_list.

        Raises:
            RuntimeError: the list may not fit its memory.
        """
        made = list_for(self._spec, self._version, num_tokens, len(cu_seqlens) - 1)
        self._list.write(made, cu_seqlens)
        self._info = made.info

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> None:
        """As AttentionBackend.forward, for the batch listed last; max_seqlen is not needed."""
        self._attend((q, k, v), out, cu_seqlens, self._run_tail)

    def _attend(
        self,
        qkv: Sequence[torch.Tensor],
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        tail: tuple[object, ...],
    ) -> None:
        self._run(
            self._float_workspace, self._list.memory, self._info,
            *qkv, cu_seqlens, cu_seqlens, out,
            None,  # log-sum-exp
            self._mask, NHD_LAYOUT, NO_WINDOW, NO_PDL,
            *tail,
        )  # fmt: skip


class FlashInferFp8Attention(FlashInferAttention):
    """fa3 of q, k and v in e4m3. It rounds the weights of values to e4m3, too, and writes spec.dtype.

    Source: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3; a scale a head in place of a block.
    """

    def __init__(self, spec: AttentionSpec, module: Any) -> None:
        super().__init__(spec, FP8, module)
        self._heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]

    def forward_fp8(
        self, heads: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> None:
        """See Fp8Attention.forward_fp8, for the batch listed last. Rows of heads: whole 16 bytes."""
        import torch

        tail = _fp8_tail(self._spec.scale, *torch.split(scales, self._heads))
        self._attend(torch.split(heads, self._heads, dim=1), out, cu_seqlens, tail)


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


def _fp8_tail(scale: float, *factors: torch.Tensor | None) -> tuple[object, ...]:
    """factors: of q, k and v by head, or None for 1."""
    return (*(factors or (None, None, None)), scale, 1.0, 1.0, 1.0)


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
