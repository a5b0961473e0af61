"""FlashAttention-4: offsets are read on the device, so no host plan, and one graph serves any lengths.

The grid depends on the token and sequence counts only; surplus blocks exit at once. Rows past the last
offset are neither computed nor written. Above 256 sequences upstream adds two tiny kernels that speed up a
block's search for its sequence; they allocate and save a few microseconds at most, so they are left out:
the search itself (a warp scans 31 sequences a step) is right for any count.

Keys and values are fetched in tiles of 128 rows that may reach past the end of a sequence; what is fetched
there counts with weight zero, so it must be finite: keep NaN out of padded rows of q, k and v.
Source: flash-attn-4 4.0.0b36, cute/interface.py (_flash_attn_fwd), cute/tile_scheduler.py (VarlenDecoder).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.aot.library import Kernel, KernelQuery

if TYPE_CHECKING:
    import torch

    from rose.attention.base import AttentionSpec
    from rose.batch import Int32

NAME = "fa4"
# Half as many query rows a block, and brought up while the kernel before still runs: for batches of so few
# blocks that most of the GPU would be idle.
SMALL, SMALL_ROWS = "fa4-64x128-early", 64


def query_for(spec: AttentionSpec, build: str = NAME) -> KernelQuery:
    """What `spec` needs: FlashAttention-4 compiles the heads a key/value head and the mask in."""
    group = spec.num_heads // spec.num_kv_heads
    return KernelQuery(build, spec.head_dim, group, spec.causal, str(spec.dtype).removeprefix("torch."))


class Fa4Attention:
    """The kernel of an ahead-of-time shared object (or any callable of its 18 arguments)."""

    capturable = True
    plans = False

    def __init__(self, spec: AttentionSpec, kernel: Kernel, name: str = NAME) -> None:
        self.name = name
        self._scale = spec.scale
        self._kernel = kernel

    def plan(self, host_cu_seqlens: Int32) -> None:
        """Nothing: the kernel reads the offsets on the device."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> None:
        """As AttentionBackend.forward; max_seqlen is not needed."""
        self._kernel(
            q, k, v, out,
            None,  # log-sum-exp
            self._scale, cu_seqlens, cu_seqlens,
            None, None,  # used lengths of q and k
            None,  # page table
            None, None,  # window, left and right
            None,  # sink
            None,  # block sparsity
            (None, None),  # tensors and scalars of a score modifier
            None, None,  # block counts, total and split
        )  # fmt: skip


def jit_kernel(spec: AttentionSpec) -> Kernel:
    """The installed `flash_attn.cute` behind the same 18 arguments; it compiles (seconds) at its first call.

    Slower on the host than the shared object, since the package checks its arguments on each call; the same
    on the device.

    Raises:
        ImportError: flash-attn-4 or a package that it needs is not installed.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    def call(*arguments: torch.Tensor) -> None:
        q, k, v, out, _, scale, cu_seqlens = arguments[:7]
        _flash_attn_fwd(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            softmax_scale=scale, causal=spec.causal, out=out,
        )  # fmt: skip

    return call
