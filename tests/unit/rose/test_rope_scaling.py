"""Scaled rotation: frequencies and vectors as in transformers, below and above the trained length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rose.config import load_config
from rose.errors import ModelLoadError
from rose.kernels.frequencies import frequencies
from rose.kernels.fused import ADJACENT
from rose.kernels.rope import QkRope, rope_table
from rose.layers.fused_decoder import angle_table
from rose.reference.frequencies import scaled_frequencies
from tests.unit.rose.parity import assert_same, resized, save_oracle

ORIGINAL = 32
# Around and past what the model was trained for, up to four times as long.
LENGTHS = (1, 2, 31, 32, 33, 5, 64, 65, 127, 128)
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": 1e4,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 5e5,
}
KINDS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn as on Qwen3's cards": YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn, not truncated": YARN | {"truncate": False, "factor": 3.5},
    "yarn, its own betas": YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
    "yarn, one step": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, its own attention": YARN | {"attention_factor": 0.7},
    "yarn, DeepSeek's attention": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn of factor 1": YARN | {"factor": 1.0},
    "yarn, its factor implied": YARN | {"factor": None},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
    "llama3": LLAMA3,
    "llama3 as published": LLAMA3 | {"original_max_position_embeddings": 8192},
}


def _folder(folder: Path, config: PreTrainedConfig, **changes: object) -> Path:
    fields = json.loads(config.to_json_string()) | {"architectures": ["Qwen3Model"]} | changes
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _qwen3(parameters: dict[str, Any], **changes: Any) -> PreTrainedConfig:
    shapes = {"num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": 128}
    return resized(Qwen3Config, rope_parameters=dict(parameters), **shapes | changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [24, 128])
def test_frequencies_are_transformers(tmp_path: Path, kind: str, head_dim: int) -> None:
    """In fp32, which is what transformers computes in; the reference, spelled otherwise, agrees in fp64."""
    theirs = _qwen3(KINDS[kind], head_dim=head_dim)
    config = load_config(_folder(tmp_path, theirs))
    scaling = config.rope_scaling
    assert scaling is not None
    expected, attention_factor = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](theirs, "cpu")
    ours = frequencies(head_dim, config.rope_theta, scaling)
    torch.testing.assert_close(ours.float(), expected, rtol=2e-6, atol=0)
    reference = torch.tensor(scaled_frequencies(head_dim, config.rope_theta, scaling), dtype=torch.float64)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=0)
    table = rope_table(head_dim, config.rope_theta, 3, "cpu", scaling)
    assert table[0, 0].item() == pytest.approx(attention_factor, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_transformers(tmp_path: Path, kind: str) -> None:
    oracle = Qwen3Model(_qwen3(KINDS[kind]))
    assert_same(save_oracle(tmp_path, oracle, "last"), oracle, LENGTHS)


def _others() -> dict[str, PreTrainedModel]:
    return {
        "qwen2": Qwen2Model(resized(Qwen2Config, num_key_value_heads=1, rope_parameters=dict(YARN))),
        "llama": LlamaModel(resized(LlamaConfig, num_key_value_heads=5, rope_parameters=dict(LLAMA3))),
    }


@pytest.mark.parametrize("family", _others())
def test_other_decoders(tmp_path: Path, family: str) -> None:
    """Heads without a norm, with a bias, not grouped."""
    oracle = _others()[family]
    assert_same(save_oracle(tmp_path, oracle, "last"), oracle, LENGTHS)


def test_scaling_matters_here(tmp_path: Path) -> None:
    """The tests above can fail: without it, vectors of the same weights are others."""
    oracle = Qwen3Model(_qwen3(YARN))
    folder = save_oracle(tmp_path, oracle, "last")
    _folder(folder, oracle.config, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(AssertionError):
        assert_same(folder, oracle, LENGTHS)


def test_the_model_cards_way_lengthens_the_model(tmp_path: Path) -> None:
    """rope_scaling beside rope_theta; max_position_embeddings stays as it was."""
    plain = _qwen3({"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=40960)
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = load_config(
        _folder(tmp_path, plain, rope_parameters=None, rope_theta=1000000, rope_scaling=card)
    )
    assert (config.max_model_len, config.max_positions, config.rope_theta) == (131072, 131072, 1e6)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 100000}')
    assert load_config(tmp_path).max_model_len == 100000
    old = {"type": "yarn"} | {key: value for key, value in card.items() if key != "rope_type"}
    again = load_config(_folder(tmp_path, plain, rope_parameters=None, rope_theta=1000000, rope_scaling=old))
    assert again.rope_scaling == config.rope_scaling


def test_dynamic_ends_where_it_would_depend_on_neighbours(tmp_path: Path) -> None:
    oracle = Qwen3Model(_qwen3({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}))
    folder = save_oracle(tmp_path, oracle, "last")
    assert load_config(folder).max_model_len == 128
    assert_same(folder, oracle, LENGTHS)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope' is not supported; default, dynamic, linear"),
        ({"rope_type": "yarn", "factor": 0.5}, "rope factor 0.5"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": "two"}, "factor is 'two'"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA3 | {"high_freq_factor": 0.5}, "high_freq_factor 0.5"),
        (YARN | {"beta_fast": 0.5}, "beta_fast 0.5"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ("yarn", "rope_parameters is not an object"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, parameters: Any, message: str) -> None:
    _folder(tmp_path, _qwen3({"rope_type": "default", "rope_theta": 1e4}), rope_parameters=parameters)
    with pytest.raises(ModelLoadError, match=message):
        load_config(tmp_path)


def test_two_spellings_that_differ_are_refused(tmp_path: Path) -> None:
    """transformers would take rope_scaling and fall back to a base of 10000."""
    plain = _qwen3({"rope_type": "default", "rope_theta": 1e6})
    with pytest.raises(ModelLoadError, match="rope_parameters and rope_scaling differ"):
        load_config(_folder(tmp_path, plain, rope_scaling=YARN))


def test_the_fused_kernels_table_carries_the_attention_factor(tmp_path: Path) -> None:
    config = load_config(_folder(tmp_path, _qwen3(YARN, head_dim=128)))
    table = rope_table(128, config.rope_theta, 100, "cpu", config.rope_scaling)
    angles = angle_table(QkRope(1, 1, 128, 1e-6, None, table), ADJACENT)
    lengths = angles.float().view(100, 64, 2).norm(dim=2)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 1.1386294), rtol=1e-3, atol=0)
