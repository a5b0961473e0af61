"""How far bf16 is from fp32 with dummy weights, at each preset's full depth and a small width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rose.config import load_config
from rose.models.registry import build_model
from rose.reference import reference_vectors
from rose.weights import MappedWeights, dummy_weights
from tests.unit.rose.bert_cases import CPU, least_cosine, random_sequences, run
from tests.unit.rose.test_padding import PRESETS, scaled, small

LENGTHS = (5, 1, 40, 64)


@pytest.mark.parametrize(
    "alias", ["minilm", "bge-large", "nomic-embed", "modernbert-embed", "embeddinggemma", "pplx-embed"]
)
def test_dummy_weights_leave_bf16_near_fp32(alias: str) -> None:
    """Else a comparison in bf16 on a GPU says nothing of the model."""
    full = load_config(PRESETS / alias)
    config = replace(
        small(alias),
        num_layers=full.num_layers,
        windows=tuple(None if window is None else 16 for window in full.windows),
        attention_scale=None,
        max_positions=80,
        max_model_len=64,
    )
    weights = scaled(dummy_weights(config, 1), (full.hidden_size / config.hidden_size) ** 0.5)
    model = build_model(config, weights, torch.bfloat16, CPU, 128)
    sequences = random_sequences(config, LENGTHS)
    vectors = run(model, sequences).vectors
    assert least_cosine(vectors, reference_vectors(config, weights, sequences)) >= 0.999


def test_small_norm_weights_of_gemma_survive_bf16() -> None:
    """1 + 0.0035 is 1 in bf16."""
    config = replace(small("embeddinggemma"), num_layers=1, windows=(None,))
    dummy = dummy_weights(config, 1)

    class Shifted(MappedWeights):
        def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            tensor = dummy.tensor(name, shape)
            return tensor + 0.0035 if name == "norm.weight" else tensor

    sequences = random_sequences(config, (24,) * 8)
    with_shift, without = (
        run(build_model(config, weights, torch.bfloat16, CPU, 256), sequences).vectors.norm()
        for weights in (Shifted({}, "shifted"), dummy)
    )
    assert abs(float(with_shift / without) - 1.0035) < 5e-4
