"""The activations of encoders with rotation: made once on a GPU, anew in each forward on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Activations:
    """Tensors of T rows.

    residual, hidden: [T, H], the stream between layers and what a product reads. positions: i32[T].
    context: [T, Hq D]. gated: [T, I].
    product: [T, H], qkv: [T, (Hq + 2 Hk) D], gate_up: [T, 2I]: what products write; None on a CPU, as oneDNN
        makes its own.
    """

    residual: Tensor
    hidden: Tensor
    positions: Tensor
    context: Tensor
    gated: Tensor
    product: Tensor | None
    qkv: Tensor | None
    gate_up: Tensor | None


class ActivationMemory:
    """Activations for batches of up to max_tokens tokens."""

    def __init__(
        self, config: ModelConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._max_tokens = max_tokens
        self._place = (dtype, device)
        self._memory = None if device.type == "cpu" else self._allocate(max_tokens)

    def rows(self, num_tokens: int) -> Activations:
        """For T = num_tokens rows; what they hold is whatever the forward before left there.

        Raises:
            ValueError: T is larger than max_tokens.
        """
        if num_tokens > self._max_tokens:
            raise ValueError(f"batch has {num_tokens} tokens; the buffers hold {self._max_tokens}")
        memory = self._memory
        if memory is None:
            return self._allocate(num_tokens)
        return Activations(*(getattr(memory, field.name)[:num_tokens] for field in fields(memory)))

    def _allocate(self, num_tokens: int) -> Activations:
        """Zeros: attention kernels skip padded rows, and a NaN there would spread through 0 * NaN."""
        config, (dtype, device) = self._config, self._place
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def zeros(width: int) -> Tensor:
            return torch.zeros(num_tokens, width, dtype=dtype, device=device)

        on_cpu = device.type == "cpu"
        return Activations(
            residual=zeros(config.hidden_size),
            hidden=zeros(config.hidden_size),
            positions=torch.zeros(num_tokens, dtype=torch.int32, device=device),
            context=zeros(query),
            gated=zeros(config.intermediate_size),
            product=None if on_cpu else zeros(config.hidden_size),
            qkv=None if on_cpu else zeros(query + 2 * key),
            gate_up=None if on_cpu else zeros(2 * config.intermediate_size),
        )
