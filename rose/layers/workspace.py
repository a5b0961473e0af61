"""The decoder's activations: one set of tensors for every layer and every forward, made once on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig

# Rows that go through all of a layer but its attention before the next rows do, so that much of what one
# kernel writes the next finds in the 50 MB L2 cache. cuBLAS loses nothing: on an H200 it reached 674 TFLOP/s
# over a forward's products at 4096 rows, 646 at 51200.
PASS_ROWS = 4096


@dataclass(frozen=True, slots=True)
class DecoderBuffers:
    """Views of the workspace for T rows, all contiguous.

    residual, hidden: [T, H], the residual stream and a product's input or output. positions: i32[T].
    qkv: [T, (Hq + 2 Hk) D]. context: [T, Hq D].
    wide, narrow: flat, for gate and up [R, 2I] and their SwiGLU [R, I] of one pass of R rows.
    partials: flat, for the partial sums of split-K products.
    """

    residual: Tensor
    hidden: Tensor
    positions: Tensor
    qkv: Tensor
    context: Tensor
    wide: Tensor
    narrow: Tensor
    partials: Tensor

    def rows(self, start: int, stop: int) -> DecoderBuffers:
        """The same for rows start to stop; the flat ones are shared."""
        return DecoderBuffers(
            self.residual[start:stop],
            self.hidden[start:stop],
            self.positions[start:stop],
            self.qkv[start:stop],
            self.context[start:stop],
            self.wide,
            self.narrow,
            self.partials,
        )


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
        return self._allocate(num_tokens) if self._memory is None else self._memory.rows(0, num_tokens)

    def _allocate(self, num_tokens: int) -> DecoderBuffers:
        """Zeros: attention kernels skip padded rows, and a NaN there would spread through 0 * NaN."""
        dtype, device = self._place

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        hidden, qkv, context = self._widths
        pass_rows = min(num_tokens, PASS_ROWS)
        return DecoderBuffers(
            residual=zeros(num_tokens, hidden),
            hidden=zeros(num_tokens, hidden),
            positions=zeros(num_tokens, kind=torch.int32),
            qkv=zeros(num_tokens, qkv),
            context=zeros(num_tokens, context),
            wide=zeros(pass_rows * 2 * self._inner),
            narrow=zeros(pass_rows * self._inner),
            partials=zeros(self._partial_elements),
        )


def passes(num_tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of as few passes as keep each at PASS_ROWS or less, cut at multiples of 128 rows.

    They are equal to within 128 rows, so that none is so short that its products would be slow: if there are
    two or more, each has over PASS_ROWS / 2 - 128 rows.
    """
    count = max(-(-num_tokens // PASS_ROWS), 1)
    blocks = -(-num_tokens // 128)
    cuts = [128 * (index * blocks // count) for index in range(count)]
    return list(pairwise([*cuts, num_tokens]))
