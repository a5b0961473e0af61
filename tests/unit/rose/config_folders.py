"""Model folders without weights, and the refusals of those that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose.config import load_config
from rose.errors import ModelLoadError

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 60,
    "intermediate_size": 92,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "num_attention_heads": 5,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 101,
}
QWEN3 = {
    "architectures": ["PPLXQwen3Model"],
    "model_type": "bidirectional_pplx_qwen3",
    "use_bidirectional_attention": True,
    "hidden_act": "silu",
    "hidden_size": 48,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 101,
}
ST = "sentence_transformers.models."


def model_folder(
    path: Path, config: object, modules: list[str] | None = None, pooling: object = None
) -> Path:
    """A model folder without weights; `modules` are class paths."""
    (path / "config.json").write_text(json.dumps(config))
    if modules is not None:
        paths = {"Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        entries = [
            {"idx": idx, "name": str(idx), "path": paths.get(kind.rpartition(".")[2], ""), "type": kind}
            for idx, kind in enumerate(modules)
        ]
        (path / "modules.json").write_text(json.dumps(entries))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def refusal_of(path: Path) -> str:
    """The one line that refuses it, with its path."""
    with pytest.raises(ModelLoadError) as raised:
        load_config(path)
    message = str(raised.value)
    assert "\n" not in message and str(path) in message
    return message
