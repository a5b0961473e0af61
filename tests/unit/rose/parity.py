"""One small model of any family: transformers' own, saved as a folder, and ours built from that folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from sentence_transformers.sentence_transformer.modules.pooling import Pooling as PoolingModule
from transformers import PreTrainedConfig, PreTrainedModel

from rose.batch import Int32
from rose.config import load_config
from rose.models.registry import Model, build_model
from rose.reference import reference_vectors
from rose.weights import open_weights
from tests.unit.rose.bert_cases import CPU, least_cosine, random_sequences, run

# Runs of equal lengths, single tokens, and lengths at and around the windows of the models that have one.
LENGTHS = (5, 1, 17, 5, 64, 2, 5, 33, 9, 10, 96)


def save_oracle(folder: Path, oracle: PreTrainedModel, pooling: str = "mean", seed: int = 3) -> Path:
    """Random weights of a scale at which attention is far from uniform and norms far from 1, in a folder."""
    torch.manual_seed(seed)
    for name, tensor in oracle.named_parameters():
        is_norm = "norm" in name.lower() or "_ln" in name
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3
        tensor.data = torch.randn_like(tensor) * scale + (float(is_norm) if name.endswith("weight") else 0.0)
    oracle.eval().save_pretrained(folder)
    add_modules(folder, {"1_Pooling": pooling_config(pooling, oracle.config.hidden_size)})
    return folder


def pooling_config(pooling: str, size: int) -> dict[str, object]:
    """As sentence-transformers writes it."""
    return {"pooling_mode": "lasttoken" if pooling == "last" else pooling, "embedding_dimension": size}


def add_modules(folder: Path, modules: Mapping[str, Mapping[str, object]]) -> None:
    """A modules.json of a Transformer and `modules`: configuration by folder, named N_Kind."""
    entries = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for name, fields in modules.items():
        kind = name.partition("_")[2]
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(fields))
        entries.append({"idx": len(entries), "path": name, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(entries))


def our_model(folder: Path) -> Model:
    """Ours from the folder, on the CPU in fp32."""
    return build_model(load_config(folder), open_weights(folder), torch.float32, CPU, 1 << 12)


def oracle_hidden(oracle: PreTrainedModel, ids: Int32, **arguments: object) -> torch.Tensor:
    """transformers' last hidden states f32[n, H] of one sequence alone, without padding."""
    with torch.no_grad():
        hidden: torch.Tensor = oracle(torch.from_numpy(ids).long()[None], **arguments).last_hidden_state[0]
    return hidden


def pooled(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """f32[H] of f32[n, H], by sentence-transformers."""
    mode = "lasttoken" if pooling == "last" else pooling
    features = {
        "token_embeddings": hidden[None],
        "attention_mask": torch.ones(1, len(hidden), dtype=torch.long),
    }
    vector: torch.Tensor = PoolingModule(hidden.shape[1], mode)(features)["sentence_embedding"][0]
    return vector


def assert_same(
    folder: Path, oracle: PreTrainedModel, lengths: Sequence[int] = LENGTHS, **hf: object
) -> None:
    """Ours on one ragged batch and the reference give what transformers gives each sequence alone."""
    config, model = load_config(folder), our_model(folder)
    sequences = random_sequences(config, lengths)
    expected = torch.stack([pooled(oracle_hidden(oracle, ids, **hf), config.pooling) for ids in sequences])
    vectors = run(model, sequences).vectors
    assert least_cosine(vectors, expected) >= 0.99999
    torch.testing.assert_close(vectors, expected, rtol=2e-3, atol=2e-4)
    reference = reference_vectors(config, open_weights(folder), sequences)
    torch.testing.assert_close(reference, expected, rtol=2e-3, atol=2e-4)


def shapes(**changes: object) -> dict[str, object]:
    """Odd sizes under transformers' usual names; no width is a multiple of 16."""
    return {
        "vocab_size": 101,
        "hidden_size": 60,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "intermediate_size": 92,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    } | changes


def resized(config_class: type[PreTrainedConfig], **changes: object) -> PreTrainedConfig:
    """A configuration of `config_class` with the odd sizes."""
    return config_class(**shapes(**changes))
