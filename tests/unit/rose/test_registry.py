"""Which model is built, and what is said of weights that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.config import load_config
from rose.errors import ModelLoadError
from rose.models.bert import BertModel
from rose.models.qwen3 import Qwen3Model
from rose.models.registry import build_model
from rose.weights import MappedWeights, dummy_weights
from tests.unit.rose.bert_cases import BERT, CPU, make_case

PRESETS = Path(__file__).resolve().parents[3] / "rose" / "presets"


@pytest.mark.parametrize(("alias", "kind"), [("minilm", BertModel), ("pplx-embed", Qwen3Model)])
def test_the_architecture_chooses_the_class(alias: str, kind: type) -> None:
    config = replace(
        load_config(PRESETS / alias), num_layers=1, vocab_size=10, max_positions=16, intermediate_size=8
    )
    model = build_model(config, dummy_weights(config), torch.float32, CPU, 64)
    assert type(model) is kind
    assert (model.attention_spec.causal, model.attention_spec.head_dim) == (False, config.head_dim)


@pytest.mark.parametrize(
    "name",
    [
        "embeddings.word_embeddings.weight",
        "encoder.layer.2.output.LayerNorm.bias",
        "encoder.layer.0.attention.self.key.bias",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    state = {key: tensor for key, tensor in make_case(BERT).oracle.state_dict().items() if key != name}
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        build_model(BERT, MappedWeights(state, "memory"), torch.float32, CPU, 64)


def test_a_config_of_another_model_is_named() -> None:
    other = replace(BERT, intermediate_size=BERT.intermediate_size + 1)
    with pytest.raises(ModelLoadError, match=r"output\.dense\.weight.*\[60, 92\].*\[60, 93\]"):
        build_model(other, make_case(BERT).weights, torch.float32, CPU, 64)
