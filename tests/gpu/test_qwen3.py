"""Qwen3 at full size in bf16 on the GPU, against the fp32 reference; and captured in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.attention.backends import load_backends
from rose.attention.base import AttentionBackend
from rose.config import ModelConfig, load_config
from rose.configs.rope import YarnScaling
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels.early import Early
from rose.models import qwen3
from rose.models.qwen3 import Qwen3Model
from rose.reference import reference_vectors
from rose.weights import DummyWeights

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 4608


@dataclass(frozen=True)
class Loaded:
    """A model of full size with random weights, and an attention backend for it."""

    model: Qwen3Model
    weights: DummyWeights
    attention: AttentionBackend


@pytest.fixture(scope="module", params=["pplx-embed", "qwen3-embedding"])
def loaded(request) -> Iterator[Loaded]:
    config = load_config(ROOT / "rose" / "presets" / request.param)
    weights = DummyWeights(1, "cuda")
    model = Qwen3Model(config, weights, torch.bfloat16, torch.device("cuda"), MAX_TOKENS)
    backends = load_backends(model.attention_spec, compile_missing=False)
    yield Loaded(model, weights, next(iter(backends.values())))
    torch.cuda.empty_cache()


def _sequences(config: ModelConfig, lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab_size, length).astype(np.int32) for length in lengths]


def _outputs(config: ModelConfig, num_seqs: int) -> Outputs:
    vectors = torch.full((num_seqs, config.hidden_size), float("nan"), device="cuda")
    int8 = torch.full(vectors.shape, 77, dtype=torch.int8, device="cuda") if config.quantizer else None
    return Outputs(vectors, int8)


def _batch(loaded: Loaded, sequences: list[np.ndarray], padded_to: int, filler: int = 0) -> DeviceBatch:
    """Padded to `padded_to` tokens and one empty sequence more."""
    lengths = [*map(len, sequences), 0]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.full(padded_to, filler, np.int32)
    ids[: offsets[-1]] = np.concatenate(sequences)
    loaded.attention.plan(offsets, padded_to, 0)
    return DeviceBatch(
        input_ids=torch.from_numpy(ids).cuda(),
        cu_seqlens=torch.from_numpy(offsets).cuda(),
        token_type_ids=None,
        host_cu_seqlens=offsets,
        max_seqlen=padded_to,
        attention=loaded.attention,
    )


def _run(loaded: Loaded, sequences: list[np.ndarray], padded_to: int, filler: int = 0) -> Outputs:
    outputs = _outputs(loaded.model.config, len(sequences) + 1)
    with torch.inference_mode():
        loaded.model.forward(_batch(loaded, sequences, padded_to, filler), outputs)
    torch.cuda.synchronize()
    return outputs


def _cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(a.double().cpu(), b.double().cpu(), dim=-1)


# 16, 64 and 128 rows take split-K products, 320 and more take cuBLAS.
@pytest.mark.parametrize(
    ("lengths", "padded_to"),
    [([9], 16), ([1, 30, 2], 64), ([127], 128), ([100, 150], 320), ([512] * 4, 2048), ([4096, 3], 4352)],
)
def test_near_the_fp32_reference(loaded, lengths, padded_to):
    config = loaded.model.config
    sequences = _sequences(config, lengths)
    outputs = _run(loaded, sequences, padded_to)
    expected = reference_vectors(config, loaded.weights, sequences, device="cuda")
    cosines = _cosines(outputs.vectors[: len(lengths)], expected)
    assert cosines.min() >= 0.999, cosines
    assert (outputs.vectors[len(lengths)] == 0).all()
    if outputs.int8 is not None:
        exact = torch.tanh(outputs.vectors) * 127
        assert (outputs.int8.float() - exact).abs().max() <= 0.51


# One kernel rotates up to 512 rows, as a rule a product's epilogue above.
@pytest.mark.parametrize(
    ("lengths", "padded_to"), [([9, 40], 64), ([100, 300], 448), ([4000, 500], 4608), ([1024] * 4, 4096)]
)
def test_yarn_below_and_above_the_trained_length(loaded, lengths, padded_to):
    """cos and sin carry its attention factor wherever they are read."""
    yarn = YarnScaling(4.0, 1024, slow_turns=1.0, fast_turns=32.0, attention_factor=1.14, truncate=True)
    config = replace(loaded.model.config, rope_scaling=yarn)
    model = Qwen3Model(config, loaded.weights, torch.bfloat16, torch.device("cuda"), MAX_TOKENS)
    sequences = _sequences(config, lengths)
    vectors = _run(replace(loaded, model=model), sequences, padded_to).vectors[: len(lengths)]
    expected = reference_vectors(config, loaded.weights, sequences, device="cuda")
    assert _cosines(vectors, expected).min() >= 0.999
    plain = reference_vectors(loaded.model.config, loaded.weights, sequences, device="cuda")
    assert _cosines(vectors, plain).min() < _cosines(vectors, expected).min()


def test_packed_as_alone(loaded):
    sequences = _sequences(loaded.model.config, [1, 64, 300, 17, 129])
    packed = _run(loaded, sequences, 512).vectors
    for row, sequence in enumerate(sequences):
        alone = _run(loaded, [sequence], -(-len(sequence) // 64) * 64).vectors
        assert _cosines(packed[row], alone[0]) >= 0.999


@pytest.mark.parametrize("padded_to", [64, 128, 512])
def test_padding_changes_no_bit(loaded, padded_to):
    sequences = _sequences(loaded.model.config, [padded_to // 2 - 3])
    first, second = (_run(loaded, sequences, padded_to, filler).vectors[0] for filler in (0, 7777))
    assert torch.equal(first, second)


def test_replays_with_other_tokens_and_offsets(loaded):
    """Captured once for 320 tokens and 4 sequences; then anything of that size, right each time."""
    if not loaded.attention.capturable:
        pytest.skip(f"{loaded.attention.name} cannot be captured")
    config = loaded.model.config
    static = _batch(loaded, _sequences(config, [320, 0, 0]), 320)
    outputs = _outputs(config, static.num_seqs)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        loaded.model.forward(static, outputs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            loaded.model.forward(static, outputs)
    for seed, lengths in enumerate([[320, 0, 0], [1, 0, 200], [3, 5, 7], [100, 100, 120]]):
        sequences = _sequences(config, lengths, seed)
        other = _batch(loaded, sequences, 320)
        static.input_ids.copy_(other.input_ids)
        static.cu_seqlens.copy_(other.cu_seqlens)
        outputs.vectors.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = reference_vectors(config, loaded.weights, sequences, device="cuda")
        for row, length in enumerate(lengths):
            if length:
                assert _cosines(outputs.vectors[row], expected[row]) >= 0.999


@pytest.mark.parametrize("padded_to", [16, 128, 512, 768, 1024, 1536, 4352])
@pytest.mark.parametrize("early", [Early.AT_ONCE, Early.AFTER_WAIT])
def test_early_launches_change_no_bit(loaded, padded_to, early, monkeypatch):
    """Kernels brought up before the one before is done still wait for what it writes."""
    sequences = _sequences(loaded.model.config, [padded_to - 10, 3])
    monkeypatch.setattr(qwen3, "early_for", lambda *batch: Early.NO)
    expected = _run(loaded, sequences, padded_to).vectors
    monkeypatch.setattr(qwen3, "early_for", lambda *batch: early)
    for _ in range(5):
        assert torch.equal(_run(loaded, sequences, padded_to).vectors, expected)


class CopyAttention:
    """Stands in for attention: copies queries, allocates nothing, waits for nothing."""

    name = "copy"
    capturable = True

    def plan(self, host_cu_seqlens: np.ndarray, num_tokens: int, slot: int) -> None:
        """Nothing to do."""

    def forward(self, q, k, v, out, cu_seqlens, max_seqlen) -> None:
        out.copy_(q)


@pytest.mark.parametrize("padded_to", [16, 64, 128, 512])
def test_forward_neither_allocates_nor_waits(loaded, padded_to):
    stub = replace(loaded, attention=CopyAttention())
    batch = _batch(stub, _sequences(loaded.model.config, [padded_to - 2]), padded_to)
    outputs = _outputs(loaded.model.config, batch.num_seqs)
    with torch.inference_mode():
        loaded.model.forward(batch, outputs)  # compiles kernels, makes cuBLAS's workspace
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            loaded.model.forward(batch, outputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_fp32_equals_the_reference(loaded):
    config = replace(loaded.model.config, num_layers=4)
    model = Qwen3Model(config, loaded.weights, torch.float32, torch.device("cuda"), 256)
    attention = load_backends(model.attention_spec, compile_missing=False)["sdpa"]
    sequences = _sequences(config, [5, 100, 64])
    vectors = _run(Loaded(model, loaded.weights, attention), sequences, 192).vectors
    expected = reference_vectors(config, loaded.weights, sequences, device="cuda")
    assert _cosines(vectors[:3], expected).min() >= 0.99999
