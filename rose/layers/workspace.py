"""The decoder's activations: one set of tensors for every layer and every forward, made once on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderBuffers:
    """Views of the workspace for T rows, all contiguous.

    residual, hidden: [T, H], the residual stream and a layer's input. positions: i32[T].
    qkv [T, (Hq + 2 Hk) D] and gate_up [T, 2I] are one memory, as are context [T, Hq D] and gated [T, I]: of
    each pair the first is dead before the second is written, and what is reused stays in the L2 cache.
    partials: flat, for the partial sums of split-K products.
    """

    residual: Tensor
    hidden: Tensor
    positions: Tensor
    qkv: Tensor
    gate_up: Tensor
    context: Tensor
    gated: Tensor
    partials: Tensor


class Workspace:
    """Memory for batches of up to max_tokens rows. On a CPU nothing is kept: every forward makes its own.

    partial_elements: the most that any split-K product of the model writes.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        partial_elements: int = 0,
    ) -> None:
        query = config.num_heads * config.head_dim
        self._hidden = config.hidden_size
        self._qkv = query + 2 * config.num_kv_heads * config.head_dim
        self._context = query
        self._inner = config.intermediate_size
        self._partial_elements = 0 if device.type == "cpu" else partial_elements
        self._max_tokens = max_tokens
        self._place = (dtype, device)
        self._memory = None if device.type == "cpu" else self._allocate(max_tokens)

    def __repr__(self) -> str:
        kept = 0 if self._memory is None else sum(memory.nbytes for memory in self._memory)
        return f"Workspace(max_tokens={self._max_tokens}, {kept / 2**20:.0f} MiB)"

    def rows(self, num_tokens: int) -> DecoderBuffers:
        """Buffers for T = num_tokens rows; what they hold is whatever the forward before left there.

        Raises:
            ValueError: T is larger than max_tokens.
        """
        if num_tokens > self._max_tokens:
            raise ValueError(f"batch has {num_tokens} tokens; the workspace holds {self._max_tokens}")
        memory = self._allocate(num_tokens) if self._memory is None else self._memory
        residual, hidden, positions, wide, narrow, partials = memory

        def view(whole: Tensor, width: int) -> Tensor:
            return whole[: num_tokens * width].view(num_tokens, width)

        return DecoderBuffers(
            residual=view(residual, self._hidden),
            hidden=view(hidden, self._hidden),
            positions=positions[:num_tokens],
            qkv=view(wide, self._qkv),
            gate_up=view(wide, 2 * self._inner),
            context=view(narrow, self._context),
            gated=view(narrow, self._inner),
            partials=partials,
        )

    def _allocate(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Zeros: attention kernels skip padded rows, and a NaN there would spread through 0 * NaN."""
        dtype, device = self._place
        hidden = num_tokens * self._hidden
        wide = num_tokens * max(self._qkv, 2 * self._inner)
        narrow = num_tokens * max(self._context, self._inner)
        residual, normed, wide_memory, narrow_memory, partials = (
            torch.zeros(elements, dtype=dtype, device=device)
            for elements in (hidden, hidden, wide, narrow, self._partial_elements)
        )
        positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        return residual, normed, positions, wide_memory, narrow_memory, partials
