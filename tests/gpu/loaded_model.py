"""A model of full size with random weights on the GPU, its batches, and what is asked of every forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rose.attention.base import AttentionBackend, begin
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.models.registry import Model
from rose.weights import WeightSource

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class LoadedModel:
    """A model and an attention backend for the layers that see all."""

    model: Model
    weights: WeightSource
    attention: AttentionBackend

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def sequences(self, lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.integers(2, self.config.vocab_size, length, dtype=np.int32) for length in lengths]

    def batch(self, sequences: list[np.ndarray], padded_to: int, filler: int = 0) -> DeviceBatch:
        """Padded with `filler` to `padded_to` tokens, and with one empty sequence."""
        offsets = np.cumsum([0, *map(len, sequences), 0], dtype=np.int32)
        ids = torch.full((padded_to,), filler, dtype=torch.int32)
        ids[: offsets[-1]] = torch.from_numpy(np.concatenate(sequences))
        self.attention.plan(offsets)
        cu_seqlens = torch.from_numpy(offsets).to(CUDA)
        begin(self.attention, cu_seqlens, padded_to)
        # As the engine's: types where there are several, and then in every batch.
        types = torch.zeros(padded_to, dtype=torch.int32, device=CUDA)
        given = types if self.config.type_vocab_size > 1 else None
        return DeviceBatch(ids.to(CUDA), cu_seqlens, given, offsets, padded_to, self.attention)

    def outputs(self, num_seqs: int) -> Outputs:
        vectors = torch.full((num_seqs, self.config.dimensions), float("nan"), device=CUDA)
        int8 = None
        if self.config.quantizer:
            int8 = torch.full(vectors.shape, 77, dtype=torch.int8, device=CUDA)
        return Outputs(vectors, int8)

    def forward(self, sequences: list[np.ndarray], padded_to: int, filler: int = 0) -> Outputs:
        """Rows of `sequences` and of the empty one behind them."""
        outputs = self.outputs(len(sequences) + 1)
        with torch.inference_mode():
            self.model.forward(self.batch(sequences, padded_to, filler), outputs)
        return outputs

    def run(self, sequences: list[np.ndarray], padded_to: int, filler: int = 0) -> Outputs:
        """Rows of `sequences`."""
        outputs = self.forward(sequences, padded_to, filler)
        return Outputs(outputs.vectors[:-1], None if outputs.int8 is None else outputs.int8[:-1])

    def replayed(
        self, padded_to: int, batches: Sequence[tuple[int, int, int]]
    ) -> Iterator[tuple[list[np.ndarray], torch.Tensor]]:
        """Captured once for `padded_to` tokens and 4 sequences, then replayed with others of that size.

        Gives the sequences of each of `batches` (lengths) that are not empty, and their rows.
        """
        if not self.attention.capturable:
            pytest.skip(f"{self.attention.name} cannot be captured")
        static, outputs = self.batch(self.sequences([padded_to, 0, 0]), padded_to), self.outputs(4)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            self.model.forward(static, outputs)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self.model.forward(static, outputs)
        for seed, lengths in enumerate(batches):
            sequences = self.sequences(lengths, seed)
            other = self.batch(sequences, padded_to)
            static.input_ids.copy_(other.input_ids)
            static.cu_seqlens.copy_(other.cu_seqlens)
            outputs.vectors.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            real = [row for row, length in enumerate(lengths) if length]
            yield [sequences[row] for row in real], outputs.vectors[real]


class CopyAttention:
    """Stands in for attention: copies queries, allocates nothing, waits for nothing."""

    name = "copy"
    capturable = True
    plans = False

    def plan(self, host_cu_seqlens: np.ndarray) -> None:
        """Nothing to do."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> None:
        out.copy_(q)


def least_cosine(vectors: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all pairs of rows."""
    cosines = torch.nn.functional.cosine_similarity(vectors.double().cpu(), expected.double().cpu(), dim=-1)
    return cosines.min().item()


@contextmanager
def nothing_waits() -> Iterator[None]:
    """What is done inside may not wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def nothing_allocated() -> Iterator[None]:
    """Nor may it allocate memory on the device."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with nothing_waits():
        yield
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
