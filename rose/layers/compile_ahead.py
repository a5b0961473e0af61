"""Compile a model's Triton kernels while it loads, in parallel, rather than in the first requests."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rose.attention import flat
from rose.attention.backends import write_empty_lists
from rose.attention.base import BatchShape
from rose.attention.policy import KNOWN, choose
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels import dispatch
from rose.kernels.absorbed import MIN_LENGTH, MIN_TOKENS
from rose.kernels.delivery import deliver
from rose.kernels.fused import fused_row_counts
from rose.kernels.gemm import plan_rows

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rose.attention.base import AttentionBackend, AttentionSpec
    from rose.config import ModelConfig
    from rose.kernels.gemm import WeightKey
    from rose.models.registry import Model

# A compilation holds a thread about a quarter of its time outside the interpreter lock; more do not help.
_MAX_THREADS = 8
# As many sequences as the variants of attention kernels depend on.
_MAX_SEQS = 512


class NoAttention:
    """A backend that leaves its output as it is."""

    name = "none"
    capturable = False
    plans = False

    def plan(self, host_cu_seqlens: np.ndarray) -> None:
        """Nothing to do."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> None:
        """Nothing to do."""


class _NoFp8Attention(NoAttention):
    """The same of heads in e4m3."""

    def forward_fp8(self, heads: Tensor, scales: Tensor, out: Tensor, cu_seqlens: Tensor) -> None:
        """Nothing to do."""


def row_counts(keys: Collection[WeightKey], max_tokens: int) -> list[int]:
    """Numbers of tokens up to max_tokens that between them launch every variant of every kernel.

    Powers of two pass every point at which a kernel takes another shape; products change at the table's rows.
    """
    powers = (1 << power for power in range(max_tokens.bit_length()))
    changes = {*plan_rows(keys), *fused_row_counts()}
    return sorted({*powers, *(count for count in changes if 0 < count < max_tokens), max_tokens})


def compile_ahead(model: Model, row_counts: Iterable[int]) -> None:
    """Go through forwards of these numbers of tokens, where kernels are compiled but not run.

    Products by cuBLAS and kernels in CUDA C++ do run, on whatever the activations hold, and so are loaded.
    """
    probe = torch.zeros(1, device=model.attention_spec.device)
    if not dispatch.uses_triton(probe):
        return
    from rose.kernels.jit.compile import compiling

    with torch.inference_mode(), compiling(min(os.cpu_count() or 1, _MAX_THREADS)):
        words = torch.zeros(model.config.dimensions, dtype=torch.int32, device=probe.device)
        deliver(torch.zeros(1, dtype=torch.int64, device=probe.device), words, (1, len(words)))
        write_empty_lists(model.attention_spec)
        counts = list(row_counts)
        for num_tokens in counts:
            batch, outputs = _empty_step(model, BatchShape(num_tokens, 1, num_tokens), NoAttention())
            model.forward(batch, outputs)
            # Where tokens give something, the last layer takes all rows, and pooling is another kernel.
            if model.config.pooling in ("cls", "last") and model.config.token_outputs:
                hidden = torch.zeros(num_tokens, model.config.hidden_size, device=probe.device)
                model.forward(batch, replace(outputs, tokens={"hidden": hidden}))
            # A last layer that absorbs projections of a few long sequences has other kernels for short ones.
            if _absorbs(model.config) and num_tokens >= MIN_TOKENS:
                many = BatchShape(num_tokens, 2 * num_tokens // MIN_LENGTH, num_tokens)
                model.forward(*_empty_step(model, many, NoAttention()))
            if model.attention_spec.fp8:
                model.forward(replace(batch, attention=_NoFp8Attention()), outputs)
        for shape, attention in _triton_attention(model.attention_spec, counts):
            model.forward(*_empty_step(model, shape, attention))


def _absorbs(config: ModelConfig) -> bool:
    """Whether the last layer may: BERT's, whose queries and keys are not rotated, for single rows."""
    return config.architecture == "bert" and config.pooling in ("cls", "last")


def _triton_attention(
    spec: AttentionSpec, row_counts: Collection[int]
) -> Iterator[tuple[BatchShape, AttentionBackend]]:
    """Batches that between them launch every variant of our attention kernels that the policy may choose."""
    if not flat.takes(spec):
        return
    backends = {kind.name: kind(spec) for kind in flat.BACKENDS}
    met = set()
    for num_tokens in row_counts:
        for num_seqs in (1 << power for power in range(min(num_tokens, _MAX_SEQS).bit_length())):
            shape = BatchShape(num_tokens, num_seqs, num_tokens)
            backend = backends.get(choose(spec, shape, KNOWN))
            if backend is None:
                continue
            # What is launched early, and from how many partial sums, changes with the tokens.
            variant = (backend.name, num_tokens, backend.plan_of(num_tokens, num_seqs), num_seqs > 1)
            if variant not in met:
                met.add(variant)
                yield shape, backend


def _empty_step(model: Model, shape: BatchShape, attention: AttentionBackend) -> tuple[DeviceBatch, Outputs]:
    """A batch of tokens of id 0, all in the last of its sequences, and where its vectors go."""
    device, config, num_tokens = model.attention_spec.device, model.config, shape.num_tokens
    # What a pooling gives; the layers behind it that some models have are put around `model` later.
    width = config.dimensions if config.task == "sparse" else config.hidden_size
    cu_seqlens = torch.tensor([0] * shape.num_seqs + [num_tokens], dtype=torch.int32)
    types = None
    if config.type_vocab_size > 1:  # then all batches have them, as StagingLayout.has_types
        types = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    batch = DeviceBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        cu_seqlens=cu_seqlens.to(device),
        token_type_ids=types,
        host_cu_seqlens=cu_seqlens.numpy(),
        max_seqlen=num_tokens,
        attention=attention,
    )
    vectors = torch.zeros(shape.num_seqs, width, device=device)
    int8 = torch.zeros(shape.num_seqs, width, dtype=torch.int8, device=device) if config.quantizer else None
    return batch, Outputs(vectors, int8)
