"""Scoring models from their folders: packed logits as transformers gives them one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from rose.batch import Float32, Int32, RaggedBatch
from rose.config import load_config
from rose.device_batch import Outputs
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from rose.errors import ModelLoadError
from rose.heads.stages import Stage, Stages

ENCODER: dict[str, Any] = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 92,
    "vocab_size": 101,
    "max_position_embeddings": 66,
}
DECODER: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
YES, NO = 17, 40
LENGTHS = (1, 7, 3, 30, 2)
THREE = {"id2label": {0: "contradiction", 1: "entailment", 2: "neutral"}}


def _bert(**fields: Any) -> Any:
    return BertForSequenceClassification(BertConfig(**ENCODER, num_labels=1, **fields))


def _roberta(**fields: Any) -> Any:
    return RobertaForSequenceClassification(RobertaConfig(**ENCODER, type_vocab_size=1, **fields))


def _xlm_roberta(**fields: Any) -> Any:
    config = XLMRobertaConfig(**ENCODER, num_labels=1, type_vocab_size=1, **fields)
    return XLMRobertaForSequenceClassification(config)


def _modernbert(**fields: Any) -> Any:
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 80}
    config = ModernBertConfig(
        **sizes,
        vocab_size=101,
        max_position_embeddings=64,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        num_labels=1,
        attn_implementation="eager",
        **fields,
    )
    return ModernBertForSequenceClassification(config)


def _qwen3_classifier(**fields: Any) -> Any:
    return Qwen3ForSequenceClassification(Qwen3Config(**DECODER, num_labels=1, **fields))


def _qwen3_reranker(**fields: Any) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**DECODER, **fields))


def _oracle(make: Callable[..., Any], folder: Path, **fields: Any) -> Any:
    """A model with random weights far from their first, small ones, saved to `folder`."""
    torch.manual_seed(3)
    model = make(**fields).eval()
    for name, tensor in model.named_parameters():
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3
        is_norm = "norm" in name.lower() and name.endswith("weight")
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if is_norm else 0.0)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def _vocabulary(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({"no": NO, "maybe": 1, "yes": YES}))


def _logits(folder: Path, sequences: list[Int32], types: list[Int32] | None = None) -> Float32:
    engine = load_engine(folder, EngineOptions(device="cpu"), dummy=False, model_name="scorer")
    try:
        assert engine.info.task == "score"
        assert engine.info.dimensions == len(engine.info.labels)
        return np.array(engine.step(RaggedBatch.pack(sequences, types)).result().vectors)
    finally:
        engine.close()


def _sequences() -> list[Int32]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, 101, length, dtype=np.int32) for length in LENGTHS]


def _expected(model: Any, sequences: list[Int32], **inputs: list[Int32]) -> Float32:
    """transformers', one sequence at a time: no padding whose handling could differ."""
    rows = []
    for index, ids in enumerate(sequences):
        named = {name: torch.from_numpy(values[index])[None] for name, values in inputs.items()}
        with torch.no_grad():
            rows.append(model(torch.from_numpy(ids)[None].long(), **named).logits[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("make", [_bert, _xlm_roberta, _qwen3_classifier])
def test_one_logit_as_transformers_gives_it(tmp_path: Path, make: Callable[..., Any]) -> None:
    model, sequences = _oracle(make, tmp_path), _sequences()
    expected = _expected(model, sequences)
    assert expected.std() > 0.1
    np.testing.assert_allclose(_logits(tmp_path, sequences), expected, atol=2e-5)


@pytest.mark.parametrize(
    "make", [_roberta, lambda **fields: BertForSequenceClassification(BertConfig(**ENCODER, **fields))]
)
def test_a_logit_a_label(tmp_path: Path, make: Callable[..., Any]) -> None:
    model, sequences = _oracle(make, tmp_path, **THREE), _sequences()
    logits = _logits(tmp_path, sequences)
    assert logits.shape == (len(LENGTHS), 3)
    np.testing.assert_allclose(logits, _expected(model, sequences), atol=2e-5)
    scorer = load_config(tmp_path).scorer
    assert scorer is not None
    assert scorer.labels == ("contradiction", "entailment", "neutral")


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("bias", [True, False])
def test_modernbert_has_a_norm_before_its_classifier(tmp_path: Path, pooling: str, bias: bool) -> None:
    fields = {"classifier_pooling": pooling, "classifier_bias": bias, "norm_bias": bias}
    model, sequences = _oracle(_modernbert, tmp_path, **fields), _sequences()
    np.testing.assert_allclose(_logits(tmp_path, sequences), _expected(model, sequences), atol=5e-5)
    assert load_config(tmp_path).pooling == pooling


@pytest.mark.parametrize("field", [{"classifier_pooling": "max"}, {"classifier_activation": "silu"}])
def test_other_heads_of_modernbert_are_refused(tmp_path: Path, field: dict[str, str]) -> None:
    _oracle(_modernbert, tmp_path)
    _edit(tmp_path, **field)
    with pytest.raises(ModelLoadError, match=f"{next(iter(field))} '{next(iter(field.values()))}'"):
        load_config(tmp_path)


def test_token_types_of_pairs_count(tmp_path: Path) -> None:
    model, sequences = _oracle(_bert, tmp_path), _sequences()
    types = [(np.arange(len(ids)) >= len(ids) // 2).astype(np.int32) for ids in sequences]
    expected = _expected(model, sequences, token_type_ids=[row.astype(np.int64) for row in types])
    logits = _logits(tmp_path, sequences, types)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert np.abs(logits - _logits(tmp_path, sequences)).max() > 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_scores_by_yes_and_no(tmp_path: Path, tied: bool) -> None:
    model, sequences = _oracle(_qwen3_reranker, tmp_path, tie_word_embeddings=tied), _sequences()
    _vocabulary(tmp_path)
    expected = np.array([rows[-1, YES] - rows[-1, NO] for rows in _each(model, sequences)])
    np.testing.assert_allclose(_logits(tmp_path, sequences)[:, 0], expected, atol=5e-5)


@pytest.mark.parametrize("false_id", [NO, None])
def test_a_logit_score_module_names_the_tokens(tmp_path: Path, false_id: int | None) -> None:
    model, sequences = _oracle(_qwen3_reranker, tmp_path), _sequences()
    _logit_score(tmp_path, {"true_token_id": YES, "false_token_id": false_id})
    taken = [
        rows[-1, YES] - (rows[-1, false_id] if false_id is not None else 0)
        for rows in _each(model, sequences)
    ]
    np.testing.assert_allclose(_logits(tmp_path, sequences)[:, 0], np.array(taken), atol=5e-5)


def _each(model: Any, sequences: list[Int32]) -> list[Float32]:
    """f32[n, V] of each sequence."""
    with torch.no_grad():
        return [model(torch.from_numpy(ids)[None].long()).logits[0].numpy() for ids in sequences]


def _logit_score(folder: Path, settings: dict[str, Any]) -> None:
    kinds = {
        "": "base.modules.transformer.Transformer",
        "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore",
    }
    modules = [
        {"idx": 0, "path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("make", "prepare", "message"),
    [
        (_qwen3_reranker, lambda folder: None, '"yes" and "no"'),
        (_qwen3_reranker, lambda folder: (folder / "vocab.json").write_text('{"yes": 1}'), '"yes" and "no"'),
        (_qwen3_reranker, lambda folder: _logit_score(folder, {"true_token_id": 101}), "101 is out of range"),
        (_qwen3_reranker, lambda folder: _logit_score(folder, {}), "true_token_id is missing"),
        (_bert, lambda folder: _logit_score(folder, {"true_token_id": 1}), "LogitScore does not fit Bert"),
        (_bert, lambda folder: _edit(folder, id2label={"0": "a", "2": "b"}), "id2label"),
        (_bert, lambda folder: _edit(folder, id2label={}), "id2label"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, make: Callable[..., Any], prepare: Callable[[Path], object], message: str
) -> None:
    make().config.save_pretrained(tmp_path)
    _edit(
        tmp_path,
        architectures=["BertForSequenceClassification" if make is _bert else "Qwen3ForCausalLM"],
    )
    prepare(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load_config(tmp_path)


def _edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_language_model_of_another_family_needs_a_module(tmp_path: Path) -> None:
    _qwen3_reranker().config.save_pretrained(tmp_path)
    _edit(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelLoadError, match="Pooling module; to score with it, a LogitScore module"):
        load_config(tmp_path)


def test_presets_of_rerankers_have_their_heads() -> None:
    presets = Path(__file__).resolve().parents[3] / "rose" / "presets"
    reranker, encoder = (load_config(presets / name).scorer for name in ("qwen3-reranker", "bge-reranker"))
    assert reranker is not None and encoder is not None
    assert (reranker.true_id, reranker.false_id, reranker.template) == (9693, 2152, "qwen3")
    assert (encoder.kind, encoder.labels, encoder.template) == ("roberta", ("LABEL_0",), "pair")


def test_more_sequences_than_buffers_hold() -> None:
    torch.manual_seed(0)
    stages = Stages([Stage(torch.randn(5, 4), torch.randn(5), "relu"), Stage(torch.randn(2, 5))])
    outputs = Outputs(torch.full((700, 2), float("nan")), torch.zeros(700, 2, dtype=torch.int8))
    pooled = stages.pooled(outputs)
    x = torch.randn(700, 4)
    pooled.vectors.copy_(x)
    stages(pooled, outputs)
    few = Outputs(torch.full((3, 2), float("nan")))
    stages.pooled(few).vectors.copy_(x[:3])
    stages(stages.pooled(few), few)
    assert torch.allclose(few.vectors, outputs.vectors[:3], atol=1e-6)
    assert outputs.int8 is not None
    assert torch.equal(outputs.int8, torch.round(torch.tanh(outputs.vectors) * 127).to(torch.int8))


@pytest.mark.parametrize("name", ["identity", "tanh", "relu", "gelu", "silu", "sigmoid"])
def test_activations_are_torchs(name: Any) -> None:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "identity": torch.nn.Identity(),
        "tanh": torch.tanh,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "sigmoid": torch.sigmoid,
    }
    x, weight, out = torch.randn(6, 4), torch.randn(3, 4), torch.empty(6, 3)
    Stage(weight, None, name)(x, out)
    assert torch.allclose(out, functions[name](x @ weight.T), atol=1e-6)
