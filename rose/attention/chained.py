"""Our own ragged attention for Hopper, which goes from work to work without a pause.

See chained_attention.cu. Of heads of 64 and 128. Its list of work is that of FlashInfer's fa3, with tiles of
128 query rows and, unless causal, with halves. As with fa4, key and value rows past the end of a sequence
may be fetched with weight zero: keep them finite.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rose.attention.work_list import Fa3List, ListMemory
from rose.kernels.cuda.chained_attention import TILE_ROWS, ListedWorks

if TYPE_CHECKING:
    import torch

    from rose.attention.base import AttentionSpec
    from rose.batch import Int32
    from rose.kernels.cuda.chained_attention import ChainedKernels

NAME = "chained"
HEAD_DIMS = (64, 128)


def takes(spec: AttentionSpec) -> bool:
    """Whether the kernels are compiled for such attention."""
    import torch

    return (
        spec.head_dim in HEAD_DIMS
        and spec.window is None
        and spec.dtype is torch.bfloat16
        and spec.scale > 0  # of the largest q·k the weight is the largest
    )


def pairs(spec: AttentionSpec) -> bool:
    """Whether blocks go in pairs: where heads with the same keys do."""
    return spec.num_heads // spec.num_kv_heads % 2 == 0


def list_for(spec: AttentionSpec, num_tokens: int, num_seqs: int) -> Fa3List:
    """What the kernels need for batches of so many tokens and sequences, padding included.

    Of pairs of heads, for pairs of blocks, where they go in pairs.
    """
    import torch

    width = 1 + pairs(spec)
    blocks = torch.cuda.get_device_properties(spec.device).multi_processor_count // width
    listed = replace(spec, num_heads=spec.num_heads // width)
    return replace(Fa3List.of(listed, TILE_ROWS, num_tokens, num_seqs, blocks), halves=not spec.causal)


class ChainedAttention:
    """The kernels of chained_attention.cu, for one model. Needs Triton, which writes the list.

    kernels: for pairs of blocks if `pairs` says so.
    """

    name = NAME
    capturable = True
    plans = False

    def __init__(self, spec: AttentionSpec, kernels: ChainedKernels) -> None:
        self._kernels = kernels
        self._spec = spec
        self._width = 1 + pairs(spec)
        self._scale = spec.scale * math.log2(math.e)
        self._list = ListMemory(NAME, spec.device)
        self._works = ListedWorks(self._list.memory, 0, 0)

    def plan(self, host_cu_seqlens: Int32) -> None:
        """Nothing: the device lists the work."""

    def write_list(self, cu_seqlens: torch.Tensor, num_tokens: int) -> None:
        """See ListedAttention.write_list.

        Raises:
            RuntimeError: the list may not fit its memory.
        """
        made = list_for(self._spec, num_tokens, len(cu_seqlens) - 1)
        self._list.write(made, cu_seqlens)
        self._works = ListedWorks(self._list.memory, made.capacity, made.blocks * self._width)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> None:
        """As AttentionBackend.forward, for the batch listed last; the list says all of its lengths."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        self._kernels.launch((q, k, v), out, self._works, self._scale, stream)
