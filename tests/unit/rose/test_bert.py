"""BERT and XLM-R on a CPU: the same vectors as transformers', alone as packed, in any order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rose.config import load_config
from rose.models.registry import Model, build_model
from rose.weights import MappedWeights, dummy_weights, open_weights
from tests.unit.rose.bert_cases import (
    BERT,
    CPU,
    XLMR,
    BertCase,
    build,
    least_cosine,
    make_case,
    oracle_vectors,
    random_sequences,
    run,
)

LENGTHS = [5, 1, 512, 17, 5, 64, 2, 5, 33]


@pytest.fixture(scope="module")
def bert() -> BertCase:
    return make_case(BERT)


@pytest.fixture(scope="module")
def minilm(minilm_folder: Path) -> Model:
    return build_model(load_config(minilm_folder), open_weights(minilm_folder), torch.float32, CPU, 1 << 16)


@pytest.fixture(scope="module")
def minilm_tokenizer(minilm_folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("shapes", [BERT, XLMR], ids=["bert", "xlm-roberta"])
def test_same_vectors_as_transformers(shapes, pooling):
    case = make_case(replace(shapes, pooling=pooling), seed=3)
    sequences = random_sequences(case.config, LENGTHS)
    vectors = run(build(case), sequences).vectors
    expected = oracle_vectors(case, sequences)
    assert least_cosine(vectors, expected) >= 0.99999
    torch.testing.assert_close(vectors, expected, rtol=1e-3, atol=1e-4)


def test_same_vectors_as_transformers_with_real_weights(minilm, minilm_folder):
    oracle = type(make_case(BERT).oracle).from_pretrained(minilm_folder, add_pooling_layer=False).eval()
    case = BertCase(minilm.config, oracle, open_weights(minilm_folder))
    sequences = random_sequences(minilm.config, [3, 40, 12, 100, 1])
    vectors, expected = run(minilm, sequences).vectors, oracle_vectors(case, sequences)
    assert least_cosine(vectors, expected) >= 0.99999
    torch.testing.assert_close(vectors, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("golden", "texts"),
    [
        ("test_bert__bert_single", ["What is Deep Learning?"]),
        (
            "test_bert__bert_batch",
            ["What is Deep Learning?", "Deep Learning is...", "What is Deep Learning?"],
        ),
    ],
)
def test_vectors_that_another_server_recorded(golden, texts, minilm, minilm_tokenizer, shared_folder):
    rows = json.loads((shared_folder / "goldens" / f"{golden}.json").read_text())["rows"]
    ids = [np.array(minilm_tokenizer.encode(text).ids, np.int32) for text in texts]
    vectors = run(minilm, ids).vectors
    assert least_cosine(vectors, torch.tensor(rows)) > 0.999
    torch.testing.assert_close(vectors, torch.tensor(rows), rtol=0.0, atol=4e-3)


def test_cut_first_and_normalised_after(minilm, minilm_tokenizer, shared_folder):
    golden = shared_folder / "goldens" / "tei_mrl128_minilm_test_single.json"
    expected = torch.tensor(json.loads(golden.read_text())["rows"])
    ids = np.array(minilm_tokenizer.encode("test").ids, np.int32)
    cut = run(minilm, [ids]).vectors[:, :128]
    torch.testing.assert_close(torch.nn.functional.normalize(cut), expected, rtol=0.0, atol=4e-3)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 24), st.integers(1, 512), st.just(7)), min_size=1, max_size=64),
    seed=st.integers(0, 2**16),
)
def test_alone_as_packed(bert, lengths, seed):
    model, sequences = build(bert), random_sequences(BERT, lengths, seed)
    packed = run(model, sequences).vectors
    for row, sequence in enumerate(sequences):
        alone = run(model, [sequence]).vectors
        assert least_cosine(packed[row : row + 1], alone) >= 0.9999
        torch.testing.assert_close(packed[row : row + 1], alone, rtol=1e-3, atol=1e-4)


def test_alone_as_packed_with_real_weights_in_every_order(minilm):
    lengths = [9, 1, 512, 12, 9, 300, 2, 64]
    sequences = random_sequences(minilm.config, lengths)
    alone = torch.cat([run(minilm, [sequence]).vectors for sequence in sequences])
    orders = [np.arange(len(lengths)), np.argsort(lengths), np.argsort(lengths)[::-1]]
    orders.append(np.random.default_rng(1).permutation(len(lengths)))
    for order in orders:
        packed = run(minilm, [sequences[index] for index in order]).vectors
        assert least_cosine(packed, alone[torch.from_numpy(order.copy())]) >= 0.9999


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 512), min_size=1, max_size=64), seed=st.integers(0, 2**16))
def test_alone_as_packed_with_real_weights(minilm, lengths, seed):
    sequences = random_sequences(minilm.config, lengths, seed)
    alone = torch.cat([run(minilm, [sequence]).vectors for sequence in sequences])
    assert least_cosine(run(minilm, sequences).vectors, alone) >= 0.9999


def test_types_reach_their_own_tokens(bert):
    sequences = random_sequences(BERT, [6, 3, 11])
    types = [(np.arange(len(sequence)) > 2).astype(np.int32) for sequence in sequences]
    vectors = run(build(bert), sequences, types).vectors
    assert least_cosine(vectors, oracle_vectors(bert, sequences, types)) >= 0.99999
    assert least_cosine(vectors[2:], run(build(bert), sequences).vectors[2:]) < 0.9999


def test_one_token_is_its_own_mean(bert):
    sequences = random_sequences(BERT, [1])
    mean, cls = (
        run(build(replace(bert, config=replace(BERT, pooling=pooling))), sequences).vectors
        for pooling in ("mean", "cls")
    )
    torch.testing.assert_close(mean, cls)


def test_int8_belongs_to_its_row_after_sorting(bert):
    sequences = random_sequences(BERT, [30, 2, 11])
    outputs = run(build(bert), sequences, quantize=True)
    assert outputs.int8 is not None
    assert torch.equal(outputs.int8, torch.round(torch.tanh(outputs.vectors) * 127).to(torch.int8))


@pytest.mark.parametrize("prefix", ["", "bert.", "model."])
def test_names_of_any_checkpoint(bert, prefix):
    def old(name: str) -> str:
        return prefix + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )

    renamed = {old(name): tensor for name, tensor in bert.oracle.state_dict().items()}
    other = replace(bert, weights=MappedWeights(renamed, "memory"))
    sequences = random_sequences(BERT, [4, 9])
    assert torch.equal(run(build(other), sequences).vectors, run(build(bert), sequences).vectors)


def test_half_precision_on_a_cpu_stays_near(bert):
    sequences = random_sequences(BERT, [5, 40, 3])
    exact = run(build(bert), sequences).vectors
    for dtype in (torch.bfloat16, torch.float16):
        rounded = run(build(bert, dtype), sequences).vectors
        assert rounded.dtype == torch.float32
        assert 0.99 < least_cosine(rounded, exact) < 0.9999999


def test_dummy_weights_give_finite_vectors_that_differ():
    model = build_model(BERT, dummy_weights(BERT, seed=1), torch.float32, CPU, 1 << 10)
    again = build_model(BERT, dummy_weights(BERT, seed=1), torch.float32, CPU, 1 << 10)
    sequences = random_sequences(BERT, [8, 8, 20])
    vectors = run(model, sequences).vectors
    assert vectors.isfinite().all() and torch.equal(vectors, run(again, sequences).vectors)
    assert least_cosine(vectors[:1], vectors[1:2]) < 0.999
