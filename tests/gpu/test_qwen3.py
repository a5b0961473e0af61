"""Qwen3 at full size in bf16 on the GPU, against the fp32 reference; and captured in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.attention.backends import load_backends
from rose.config import load_config
from rose.configs.rope import YarnScaling
from rose.kernels.early import Early
from rose.models import qwen3
from rose.models.qwen3 import Qwen3Model
from rose.reference import reference_vectors
from rose.weights import DummyWeights
from tests.gpu.loaded_model import CopyAttention, LoadedModel, least_cosine, nothing_allocated

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 4608


@pytest.fixture(scope="module", params=["pplx-embed", "qwen3-embedding"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    config = load_config(ROOT / "rose" / "presets" / request.param)
    weights = DummyWeights(1, "cuda")
    model = Qwen3Model(config, weights, torch.bfloat16, torch.device("cuda"), MAX_TOKENS)
    backends = load_backends(model.attention_spec, compile_missing=False)
    yield LoadedModel(model, weights, next(iter(backends.values())))
    torch.cuda.empty_cache()


def _expected(loaded: LoadedModel, sequences: list[np.ndarray]) -> torch.Tensor:
    return reference_vectors(loaded.config, loaded.weights, sequences, device="cuda")


# 16, 64 and 128 rows take split-K products, 320 and more take cuBLAS.
@pytest.mark.parametrize(
    ("lengths", "padded_to"),
    [([9], 16), ([1, 30, 2], 64), ([127], 128), ([100, 150], 320), ([512] * 4, 2048), ([4096, 3], 4352)],
)
def test_near_the_fp32_reference(loaded: LoadedModel, lengths: list[int], padded_to: int) -> None:
    sequences = loaded.sequences(lengths)
    outputs = loaded.forward(sequences, padded_to)
    assert least_cosine(outputs.vectors[:-1], _expected(loaded, sequences)) >= 0.999
    assert (outputs.vectors[-1] == 0).all()
    if outputs.int8 is not None:
        exact = torch.tanh(outputs.vectors) * 127
        assert (outputs.int8.float() - exact).abs().max() <= 0.51


# One kernel rotates up to 512 rows, as a rule a product's epilogue above.
@pytest.mark.parametrize(
    ("lengths", "padded_to"), [([9, 40], 64), ([100, 300], 448), ([4000, 500], 4608), ([1024] * 4, 4096)]
)
def test_yarn_below_and_above_the_trained_length(
    loaded: LoadedModel, lengths: list[int], padded_to: int
) -> None:
    """cos and sin carry its attention factor wherever they are read."""
    yarn = YarnScaling(4.0, 1024, slow_turns=1.0, fast_turns=32.0, attention_factor=1.14, truncate=True)
    config = replace(loaded.config, rope_scaling=yarn)
    model = Qwen3Model(config, loaded.weights, torch.bfloat16, torch.device("cuda"), MAX_TOKENS)
    stretched = replace(loaded, model=model)
    sequences = loaded.sequences(lengths)
    vectors = stretched.run(sequences, padded_to).vectors
    cosine = least_cosine(vectors, _expected(stretched, sequences))
    assert cosine >= 0.999
    assert least_cosine(vectors, _expected(loaded, sequences)) < cosine


def test_packed_as_alone(loaded: LoadedModel) -> None:
    sequences = loaded.sequences([1, 64, 300, 17, 129])
    packed = loaded.run(sequences, 512).vectors
    for row, sequence in enumerate(sequences):
        alone = loaded.run([sequence], -(-len(sequence) // 64) * 64).vectors
        assert least_cosine(packed[row : row + 1], alone) >= 0.999


@pytest.mark.parametrize("padded_to", [64, 128, 512])
def test_padding_changes_no_bit(loaded: LoadedModel, padded_to: int) -> None:
    sequences = loaded.sequences([padded_to // 2 - 3])
    first, second = (loaded.run(sequences, padded_to, filler).vectors for filler in (0, 7777))
    assert torch.equal(first, second)


def test_replays_with_other_tokens_and_offsets(loaded: LoadedModel) -> None:
    batches = [(320, 0, 0), (1, 0, 200), (3, 5, 7), (100, 100, 120)]
    for sequences, vectors in loaded.replayed(320, batches):
        assert least_cosine(vectors, _expected(loaded, sequences)) >= 0.999


@pytest.mark.parametrize("padded_to", [16, 128, 512, 768, 1024, 1536, 4352])
@pytest.mark.parametrize("early", [Early.AT_ONCE, Early.AFTER_WAIT])
def test_early_launches_change_no_bit(
    loaded: LoadedModel, padded_to: int, early: Early, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels brought up before the one before is done still wait for what it writes."""
    sequences = loaded.sequences([padded_to - 10, 3])
    monkeypatch.setattr(qwen3, "early_for", lambda *batch: Early.NO)
    expected = loaded.forward(sequences, padded_to).vectors
    monkeypatch.setattr(qwen3, "early_for", lambda *batch: early)
    for _ in range(5):
        assert torch.equal(loaded.forward(sequences, padded_to).vectors, expected)


@pytest.mark.parametrize("padded_to", [16, 64, 128, 512])
def test_forward_neither_allocates_nor_waits(loaded: LoadedModel, padded_to: int) -> None:
    stub = replace(loaded, attention=CopyAttention())
    batch, outputs = stub.batch(stub.sequences([padded_to - 2]), padded_to), stub.outputs(2)
    with torch.inference_mode():
        stub.model.forward(batch, outputs)  # compiles kernels, makes cuBLAS's workspace
        with nothing_allocated():
            stub.model.forward(batch, outputs)


def test_fp32_equals_the_reference(loaded: LoadedModel) -> None:
    config = replace(loaded.config, num_layers=4)
    model = Qwen3Model(config, loaded.weights, torch.float32, torch.device("cuda"), 256)
    attention = load_backends(model.attention_spec, compile_missing=False)["sdpa"]
    exact = LoadedModel(model, loaded.weights, attention)
    sequences = exact.sequences([5, 100, 64])
    assert least_cosine(exact.run(sequences, 192).vectors, _expected(exact, sequences)) >= 0.99999
