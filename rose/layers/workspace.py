"""The decoder's activations: one set of tensors for every layer and every forward, made once on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from rose.kernels.one_query import one_query_scratch

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderBuffers:
    """Views of the workspace for T rows, all contiguous.

    residual, hidden: [T, H], the residual stream and a product's input or output. positions: i32[T].
    qkv: [T, (Hq + 2 Hk) D]. context: [T, Hq D]. wide, narrow: [T, 2I] and [T, I], gate with up, and SwiGLU.
    partials: flat, for the partial sums of split-K products. scratch: from `one_query_scratch`.
    """

    residual: Tensor
    hidden: Tensor
    positions: Tensor
    qkv: Tensor
    context: Tensor
    wide: Tensor
    narrow: Tensor
    partials: Tensor
    scratch: Tensor

    def rows(self, num_tokens: int) -> DecoderBuffers:
        """The same for the first `num_tokens` rows; partials and scratch are shared."""
        names = (field.name for field in fields(self) if field.name not in ("partials", "scratch"))
        return replace(self, **{name: getattr(self, name)[:num_tokens] for name in names})

    def picked(self, num_rows: int) -> DecoderBuffers:
        """Buffers of R <= T rows, one a sequence or more, for the last layer from its attention on.

        residual and hidden change places: the residual stream's rows are copied to where this layer's input
        lay, apart from all of them, whose memory is free after that.
        """
        few = self.rows(num_rows)
        return replace(few, residual=few.hidden, hidden=few.residual)


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
        self._widths = (config.hidden_size, query + 2 * config.num_kv_heads * config.head_dim, query)
        self._inner = config.intermediate_size
        self._head_dim = config.head_dim
        self._partial_elements = 0 if device.type == "cpu" else partial_elements
        self._max_tokens = max_tokens
        self._place = (dtype, device)
        self._memory = None if device.type == "cpu" else self._allocate(max_tokens)

    def __repr__(self) -> str:
        memory = self._memory
        kept = 0 if memory is None else sum(getattr(memory, field.name).nbytes for field in fields(memory))
        return f"Workspace(max_tokens={self._max_tokens}, {kept / 2**20:.0f} MiB)"

    def rows(self, num_tokens: int) -> DecoderBuffers:
        """Buffers for T = num_tokens rows; what they hold is whatever the forward before left there.

        Raises:
            ValueError: T is larger than max_tokens.
        """
        if num_tokens > self._max_tokens:
            raise ValueError(f"batch has {num_tokens} tokens; the workspace holds {self._max_tokens}")
        return self._allocate(num_tokens) if self._memory is None else self._memory.rows(num_tokens)

    def _allocate(self, num_tokens: int) -> DecoderBuffers:
        """Zeros: attention kernels skip padded rows, and a NaN there would spread through 0 * NaN."""
        dtype, device = self._place

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        hidden, qkv, context = self._widths
        return DecoderBuffers(
            residual=zeros(num_tokens, hidden),
            hidden=zeros(num_tokens, hidden),
            positions=zeros(num_tokens, kind=torch.int32),
            qkv=zeros(num_tokens, qkv),
            context=zeros(num_tokens, context),
            wide=zeros(num_tokens, 2 * self._inner),
            narrow=zeros(num_tokens, self._inner),
            partials=zeros(self._partial_elements),
            scratch=one_query_scratch(self._head_dim, device),
        )
