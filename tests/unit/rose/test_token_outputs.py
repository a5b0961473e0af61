"""What a batch gives for each token: hidden states of every family, BGE-M3's lexical weights and vectors."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from rose.batch import BatchResult, Engine, Int32, RaggedBatch, TokenOutput
from rose.config import load_config
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from rose.errors import ModelLoadError, StepError
from rose.reference import reference_hidden
from rose.reference.tokens import lexical_weights, multi_vectors
from rose.weights import open_weights
from tests.unit.rose.parity import oracle_hidden, resized, save_oracle

ALL: frozenset[TokenOutput] = frozenset({"hidden", "lexical", "multi_vector"})
HIDDEN: frozenset[TokenOutput] = frozenset({"hidden"})
# Out of order, so that a CPU sorts them and has to put rows and tokens back.
LENGTHS = (9, 1, 30, 4, 30, 2)
SIZE = 60


def save_m3(folder: Path) -> tuple[XLMRobertaModel, torch.nn.Linear, torch.nn.Linear]:
    """A small BGE-M3 as its authors save one."""
    config = resized(XLMRobertaConfig, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    oracle = XLMRobertaModel(config, add_pooling_layer=False)
    save_oracle(folder, oracle, "cls")
    torch.manual_seed(5)
    sparse, colbert = torch.nn.Linear(SIZE, 1), torch.nn.Linear(SIZE, SIZE)
    torch.save(sparse.state_dict(), folder / "sparse_linear.pt")
    torch.save(colbert.state_dict(), folder / "colbert_linear.pt")
    return oracle, sparse, colbert


def engine_of(folder: Path, options: EngineOptions | None = None, *, dummy: bool = False) -> Engine:
    options = options or EngineOptions(device="cpu", num_threads=1)
    return load_engine(folder, options, dummy=dummy, model_name="m3")


@pytest.fixture
def m3(tmp_path: Path) -> Iterator[Engine]:
    save_m3(tmp_path)
    engine = engine_of(tmp_path)
    yield engine
    engine.close()


def sequences_of(*lengths: int) -> list[Int32]:
    rng = np.random.default_rng(1)
    return [rng.integers(4, 100, length, dtype=np.int32) for length in lengths]


def step(engine: Engine, sequences: list[Int32], kinds: frozenset[TokenOutput]) -> BatchResult:
    return engine.step(RaggedBatch.pack(sequences, token_outputs=kinds)).result()


def test_bge_m3_gives_what_its_authors_define(tmp_path: Path) -> None:
    oracle, sparse, colbert = save_m3(tmp_path)
    sequences, engine = sequences_of(*LENGTHS), engine_of(tmp_path)
    result = step(engine, sequences, ALL)
    engine.close()
    hidden = [oracle_hidden(oracle, ids) for ids in sequences]
    together = torch.cat(hidden)
    with torch.no_grad():
        expected: dict[TokenOutput, torch.Tensor] = {
            "hidden": together,
            "lexical": torch.relu(sparse(together)),
            "multi_vector": torch.nn.functional.normalize(colbert(together), dim=-1),
        }
    for kind, values in expected.items():
        np.testing.assert_allclose(result.tokens[kind], values.numpy(), atol=2e-4, rtol=2e-3)
    np.testing.assert_allclose(result.vectors, torch.stack([rows[0] for rows in hidden]), atol=2e-4)
    weights = result.tokens["lexical"]
    assert (weights == 0).any() and (weights > 0.1).any()


def test_the_reference_gives_the_same(tmp_path: Path) -> None:
    save_m3(tmp_path)
    sequences, engine, weights = sequences_of(*LENGTHS), engine_of(tmp_path), open_weights(tmp_path)
    result = step(engine, sequences, ALL)
    engine.close()
    hidden = torch.cat(list(reference_hidden(load_config(tmp_path), weights, sequences)))
    for kind, values in (
        ("hidden", hidden),
        ("lexical", lexical_weights(hidden, weights)),
        ("multi_vector", multi_vectors(hidden, weights)),
    ):
        np.testing.assert_allclose(result.tokens[kind], values.numpy(), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("kinds", [{"lexical"}, {"multi_vector"}, {"hidden"}, {"hidden", "lexical"}, set()])
def test_a_batch_gives_what_it_asks_for_and_the_same_vectors(m3: Engine, kinds: set[TokenOutput]) -> None:
    sequences = sequences_of(*LENGTHS)
    result, all_of_it = step(m3, sequences, frozenset(kinds)), step(m3, sequences, ALL)
    assert result.tokens.keys() == kinds
    np.testing.assert_allclose(result.vectors, all_of_it.vectors, atol=1e-5)
    for kind, values in result.tokens.items():
        assert values.shape == (sum(LENGTHS), m3.info.token_outputs[kind])
        np.testing.assert_array_equal(values, all_of_it.tokens[kind])


def _qwen3(**changes: object) -> PreTrainedModel:
    return Qwen3Model(resized(Qwen3Config, num_key_value_heads=1, head_dim=12, **changes))


def _modernbert() -> PreTrainedModel:
    return ModernBertModel(resized(ModernBertConfig, local_attention=16, cls_token_id=2, sep_token_id=3))


def _gemma3() -> PreTrainedModel:
    fields = {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": 24, "sliding_window": 16}
    return Gemma3TextModel(resized(Gemma3TextConfig, use_bidirectional_attention=True, **fields))


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "bert": (lambda: BertModel(resized(BertConfig), add_pooling_layer=False), "mean"),
    "nomic": (lambda: NomicBertModel(resized(NomicBertConfig), add_pooling_layer=False), "cls"),
    "modernbert": (_modernbert, "mean"),
    "gemma3": (_gemma3, "mean"),
    "qwen3-last": (_qwen3, "last"),
    "qwen3-mean": (_qwen3, "mean"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_transformers(tmp_path: Path, family: str) -> None:
    make, pooling = FAMILIES[family]
    oracle = make()
    engine = engine_of(save_oracle(tmp_path, oracle, pooling))
    sequences = sequences_of(*LENGTHS)
    result, plain = step(engine, sequences, HIDDEN), step(engine, sequences, frozenset())
    engine.close()
    expected = torch.cat([oracle_hidden(oracle, ids) for ids in sequences]).numpy()
    np.testing.assert_allclose(result.tokens["hidden"], expected, atol=5e-4, rtol=2e-3)
    np.testing.assert_allclose(result.vectors, plain.vectors, atol=1e-5)


def test_spans_and_tokens_of_one_batch(tmp_path: Path) -> None:
    """Spans keep their order when a CPU sorts the sequences; tokens have to be put back all the same."""
    oracle = BertModel(resized(BertConfig), add_pooling_layer=False)
    engine = engine_of(save_oracle(tmp_path, oracle))
    sequences, span = sequences_of(12, 3, 7), np.array([[2, 9], [0, 1]], np.int32)
    result = engine.step(RaggedBatch.pack(sequences, None, [span, None, None], HIDDEN)).result()
    engine.close()
    hidden = [oracle_hidden(oracle, ids) for ids in sequences]
    np.testing.assert_allclose(result.tokens["hidden"], torch.cat(hidden), atol=5e-4)
    rows = [hidden[0][2:9].mean(0), hidden[0][0], hidden[1].mean(0), hidden[2].mean(0)]
    np.testing.assert_allclose(result.vectors, torch.stack(rows), atol=5e-4)


def test_too_much_at_once_or_of_no_head_is_refused(tmp_path: Path) -> None:
    save_m3(tmp_path)
    (tmp_path / "sparse_linear.pt").unlink()
    engine = engine_of(tmp_path, EngineOptions(device="cpu", num_threads=1, max_token_bytes=20 * 4 * SIZE))
    assert engine.info.outputs == ("dense", "multi_vector", "hidden")
    with pytest.raises(StepError, match="asks for lexical of its tokens"):
        step(engine, sequences_of(3), frozenset({"lexical"}))
    assert len(step(engine, sequences_of(20), HIDDEN).tokens["hidden"]) == 20
    with pytest.raises(StepError, match=r"take 5040 bytes; a step gives 4800"):
        step(engine, sequences_of(21), HIDDEN)
    engine.close()


def test_heads_are_read_from_their_files_and_only_as_tensors(tmp_path: Path) -> None:
    save_m3(tmp_path)
    assert load_config(tmp_path).token_heads == ("lexical", "multi_vector")
    assert load_config(tmp_path).unweighted_ids == (0, 1, 2, 3)
    torch.save(torch.nn.Linear(SIZE, 8).state_dict(), tmp_path / "colbert_linear.pt")
    with pytest.raises(ModelLoadError, match=r"colbert_linear.pt: tensor 'weight' is \[8, 60\]"):
        engine_of(tmp_path)
    (tmp_path / "colbert_linear.pt").write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(ModelLoadError, match=r"colbert_linear.pt cannot be read"):
        engine_of(tmp_path)
    torch.save({"weight": torch.zeros(SIZE, SIZE)}, tmp_path / "colbert_linear.pt")
    with pytest.raises(ModelLoadError, match=r"colbert_linear.pt: tensor 'bias' is missing"):
        engine_of(tmp_path)


def test_a_preset_has_heads_without_weights(tmp_path: Path, repo_root: Path) -> None:
    folder = tmp_path / "bge-m3"
    shutil.copytree(repo_root / "rose" / "presets" / "bge-m3", folder)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    fields = json.loads((folder / "config.json").read_text()) | small | {"vocab_size": 500}
    (folder / "config.json").write_text(json.dumps(fields))
    engine = engine_of(folder, dummy=True)
    result = step(engine, sequences_of(40), ALL)
    engine.close()
    assert engine.info.outputs == ("dense", "sparse", "multi_vector", "hidden")
    np.testing.assert_allclose(np.linalg.norm(result.tokens["multi_vector"], axis=1), 1, atol=1e-5)
    assert 0 < (result.tokens["lexical"] > 0).sum() < 40
    (folder / "config.json").write_text(json.dumps(fields | {"token_heads": ["words"]}))
    with pytest.raises(ModelLoadError, match=r"token_heads \['words'\]"):
        load_config(folder)
