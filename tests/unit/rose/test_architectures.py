"""Every family against transformers, from a saved folder to vectors: packed as alone, with all odd cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules.dense import Dense
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
    RobertaConfig,
    RobertaModel,
)

from rose.batch import RaggedBatch
from rose.config import load_config
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from rose.errors import ModelLoadError
from tests.unit.rose.bert_cases import least_cosine, random_sequences, run
from tests.unit.rose.parity import (
    LENGTHS,
    add_modules,
    assert_same,
    oracle_hidden,
    our_model,
    pooled,
    resized,
    save_oracle,
)


def gemma3(**changes: object) -> Gemma3TextModel:
    fields = {
        "num_key_value_heads": 1,
        "num_attention_heads": 3,
        "head_dim": 24,
        "sliding_window": 16,
        "query_pre_attn_scalar": 31,
        "use_bidirectional_attention": True,
        "num_hidden_layers": 7,
    }
    return Gemma3TextModel(resized(Gemma3TextConfig, **(fields | changes)))


def modernbert(**changes: object) -> ModernBertModel:
    fields = {"local_attention": 16, "num_hidden_layers": 5, "cls_token_id": 2, "sep_token_id": 3}
    special = {"bos_token_id": 2, "eos_token_id": 3}
    return ModernBertModel(resized(ModernBertConfig, **(fields | special | changes)))


def qwen2(**changes: object) -> Qwen2Model:
    fields = {"num_key_value_heads": 2, "num_attention_heads": 6}
    return Qwen2Model(resized(Qwen2Config, **(fields | changes)))


def edit(folder: Path, **changes: object) -> None:
    """Change config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "weightedmean"])
def test_roberta(tmp_path: Path, pooling: str) -> None:
    oracle = RobertaModel(resized(RobertaConfig, pad_token_id=1, type_vocab_size=1), add_pooling_layer=False)
    assert_same(save_oracle(tmp_path, oracle, pooling), oracle)


def test_a_padding_id_within_a_roberta_text_takes_a_place_like_any_other(tmp_path: Path) -> None:
    """As other servers have it. transformers moves the tokens after it back by one, meant for padding."""
    oracle = RobertaModel(resized(RobertaConfig, pad_token_id=1, type_vocab_size=1), add_pooling_layer=False)
    model = our_model(save_oracle(tmp_path, oracle))
    ids = random_sequences(model.config, [12])[0]
    ids[4] = 1
    places = torch.arange(2, 14)[None]
    vectors = run(model, [ids]).vectors[0]
    torch.testing.assert_close(
        vectors, oracle_hidden(oracle, ids, position_ids=places).mean(0), rtol=1e-3, atol=1e-4
    )
    assert not torch.allclose(vectors, oracle_hidden(oracle, ids).mean(0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_nomic_bert(tmp_path: Path, pooling: str) -> None:
    oracle = NomicBertModel(resized(NomicBertConfig, type_vocab_size=2))
    assert_same(save_oracle(tmp_path, oracle, pooling), oracle)


def test_nomic_bert_with_token_types(tmp_path: Path) -> None:
    oracle = NomicBertModel(resized(NomicBertConfig, type_vocab_size=2))
    model = our_model(save_oracle(tmp_path, oracle))
    sequences = random_sequences(model.config, [6, 3, 11])
    types = [(np.arange(len(ids)) > 2).astype(np.int32) for ids in sequences]
    vectors = run(model, sequences, types).vectors
    for row, (ids, kinds) in enumerate(zip(sequences, types, strict=True)):
        kinds_row = torch.from_numpy(kinds).long()[None]
        expected = oracle_hidden(oracle, ids, token_type_ids=kinds_row).mean(0)
        torch.testing.assert_close(vectors[row], expected, rtol=1e-3, atol=1e-4)


def test_nomic_bert_in_its_own_spelling(tmp_path: Path) -> None:
    """The hub's config.json has GPT-2's names; tensors are saved under the hub's names in any case."""
    oracle = NomicBertModel(resized(NomicBertConfig))
    folder = save_oracle(tmp_path, oracle)
    own = {"n_embd": 60, "n_head": 5, "n_inner": 92, "n_layer": 4, "n_positions": 128, "vocab_size": 101}
    rest = {"activation_function": "swiglu", "rotary_emb_base": 1000, "layer_norm_epsilon": 1e-12}
    fields = {"architectures": ["NomicBertModel"], "type_vocab_size": 2, "rotary_emb_fraction": 1.0}
    (folder / "config.json").write_text(json.dumps(own | rest | fields))
    assert_same(folder, oracle, LENGTHS[:5])
    (folder / "config.json").write_text(json.dumps(own | rest | fields | {"rotary_scaling_factor": 2}))
    assert load_config(folder).max_model_len == 128
    long = own | {"n_positions": 8192}
    (folder / "config.json").write_text(json.dumps(long | rest | fields | {"rotary_scaling_factor": 2}))
    assert load_config(folder).max_model_len == 2048


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max", "weightedmean"])
@pytest.mark.parametrize("biases", [False, True])
def test_modernbert(tmp_path: Path, biases: bool, pooling: str) -> None:
    oracle = modernbert(attention_bias=biases, mlp_bias=biases, norm_bias=biases)
    folder = save_oracle(tmp_path, oracle, pooling)
    config = load_config(folder)
    assert config.windows == (None, 8, 8, None, 8)
    assert (config.rope_theta, config.local_rope_theta) == (160000.0, 10000.0)
    assert_same(folder, oracle)


def test_modernbert_ragged_rows_equal_single_ones(tmp_path: Path) -> None:
    """Two published paths of another server disagree on the shorter row of [long, short, long]."""
    model = our_model(save_oracle(tmp_path, modernbert()))
    long, short = random_sequences(model.config, [40, 6])
    for batch in ([long, short, long], [short, long, short, long]):
        vectors = run(model, batch).vectors
        alone = torch.cat([run(model, [ids]).vectors for ids in batch])
        torch.testing.assert_close(vectors, alone, rtol=1e-4, atol=1e-5)


def test_modernbert_in_the_published_spelling(tmp_path: Path) -> None:
    """The hub's config.json says the pattern and the bases; newer ones layer_types and rope_parameters."""
    oracle = modernbert(num_hidden_layers=6)
    folder = save_oracle(tmp_path, oracle)
    fields = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del fields[key]
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(fields | old))
    assert_same(folder, oracle, LENGTHS[:6])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_gemma3(tmp_path: Path, bidirectional: bool) -> None:
    oracle = gemma3(use_bidirectional_attention=bidirectional)
    folder = save_oracle(tmp_path, oracle)
    config = load_config(folder)
    assert (config.windows[0], config.windows[5], config.causal) == (
        8 if bidirectional else 15,
        None,
        not bidirectional,
    )
    assert_same(folder, oracle)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pooling", "causal"), [("last", True), ("last", False), ("mean", False)])
def test_qwen2(tmp_path: Path, pooling: str, causal: bool, tied: bool) -> None:
    oracle = qwen2(tie_word_embeddings=tied)
    folder = save_oracle(tmp_path, oracle, pooling)
    edit(folder, is_causal=causal)
    config = load_config(folder)
    sequences = random_sequences(config, LENGTHS)
    if causal:
        assert_same(folder, oracle)
        return
    vectors = run(our_model(folder), sequences).vectors
    for row, ids in enumerate(sequences):
        mask = torch.zeros(1, 1, len(ids), len(ids))
        expected = pooled(oracle_hidden(oracle, ids, attention_mask=mask), pooling)
        torch.testing.assert_close(vectors[row], expected, rtol=1e-3, atol=1e-4)
        assert least_cosine(vectors[row : row + 1], expected[None]) >= 0.99999


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, True),
        ({"is_causal": False}, False),
        ({"use_bidirectional_attention": True}, False),
        ({"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}, False),
        ({"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}, "is_causal": True}, True),
    ],
)
def test_who_sees_later_tokens(tmp_path: Path, changes: dict[str, object], causal: bool) -> None:
    folder = save_oracle(tmp_path, qwen2(num_hidden_layers=1))
    edit(folder, **changes)
    assert load_config(folder).causal == causal


@pytest.mark.parametrize(
    "oracle",
    [
        LlamaModel(resized(LlamaConfig, num_key_value_heads=1)),
        LlamaModel(resized(LlamaConfig, num_key_value_heads=5, head_dim=24)),
        MistralModel(resized(MistralConfig, num_key_value_heads=1, sliding_window=96)),
    ],
    ids=["llama", "llama-head-dim", "mistral"],
)
def test_llama_and_mistral(tmp_path: Path, oracle: PreTrainedModel) -> None:
    folder = save_oracle(tmp_path, oracle, "last")
    assert load_config(folder).max_model_len == (96 if isinstance(oracle, MistralModel) else 128)
    assert_same(folder, oracle)


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    """EmbeddingGemma's two: skipped, they once gave vectors that had nothing to do with the model's."""
    oracle = gemma3(num_hidden_layers=2)
    folder = save_oracle(tmp_path, oracle)
    modules = [Dense(60, 90, bias=False, activation_function=torch.nn.Identity()), Dense(90, 20)]
    names = ["2_Dense", "3_Dense"]
    add_modules(
        folder, {"1_Pooling": {"pooling_mode": "mean"}, "2_Dense": {}, "3_Dense": {}, "4_Normalize": {}}
    )
    for name, module in zip(names, modules, strict=True):
        module.save(str(folder / name))
    model = our_model(folder)
    assert (model.config.dimensions, model.config.normalize) == (20, True)
    sequences = random_sequences(model.config, LENGTHS)
    features = {"sentence_embedding": torch.stack([oracle_hidden(oracle, ids).mean(0) for ids in sequences])}
    with torch.no_grad():
        for module in modules:
            features = module(features)
    vectors = run(model, sequences).vectors
    torch.testing.assert_close(vectors, features["sentence_embedding"], rtol=1e-3, atol=1e-4)


def test_a_dense_module_without_weights_is_named(tmp_path: Path) -> None:
    folder = save_oracle(tmp_path, modernbert(num_hidden_layers=1))
    add_modules(
        folder, {"1_Pooling": {"pooling_mode": "mean"}, "2_Dense": {"in_features": 60, "out_features": 8}}
    )
    with pytest.raises(ModelLoadError, match="2_Dense: no weights"):
        our_model(folder)


@pytest.mark.parametrize(
    ("oracle", "overflows"),
    [
        (qwen2(num_hidden_layers=1), True),
        (gemma3(num_hidden_layers=1), True),
        (LlamaModel(resized(LlamaConfig, num_hidden_layers=1)), True),
        (modernbert(num_hidden_layers=1), False),
        (NomicBertModel(resized(NomicBertConfig, num_hidden_layers=1)), False),
    ],
    ids=["qwen2", "gemma3", "llama", "modernbert", "nomic"],
)
def test_float16_is_refused_where_it_overflows(
    tmp_path: Path, oracle: PreTrainedModel, overflows: bool
) -> None:
    folder = save_oracle(tmp_path, oracle)
    options = EngineOptions(device="cpu", dtype="float16", num_threads=1)
    if overflows:
        with pytest.raises(ModelLoadError, match="overflows in float16"):
            load_engine(folder, options, dummy=False, model_name="m")
        return
    engine = load_engine(folder, options, dummy=False, model_name="m")
    result = engine.step(RaggedBatch.pack(random_sequences(load_config(folder), [9, 3]))).result()
    engine.close()
    assert result.non_finite == ()
