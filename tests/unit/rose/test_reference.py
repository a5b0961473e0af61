"""The reference itself against transformers, an implementation that shares no line with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers import Qwen3Model as HfQwen3

from rose.config import ModelConfig
from rose.reference import reference_vectors
from rose.weights import MappedWeights
from tests.unit.rose.bert_cases import BERT, XLMR, least_cosine, make_case, oracle_vectors, random_sequences

QWEN3 = ModelConfig(
    architecture="qwen3",
    task="embed",
    hidden_size=36,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    intermediate_size=52,
    vocab_size=101,
    max_positions=256,
    norm_eps=1e-6,
    max_model_len=256,
    rope_theta=1e4,
)


@pytest.mark.parametrize("config", [BERT, XLMR], ids=["bert-mean", "xlm-roberta-cls"])
def test_bert_as_transformers(config):
    case = make_case(config, seed=7)
    sequences = random_sequences(config, [9, 1, 200, 9])
    types = [(np.arange(len(row)) % config.type_vocab_size).astype(np.int32) for row in sequences]
    vectors = reference_vectors(config, case.weights, sequences, types)
    torch.testing.assert_close(vectors, oracle_vectors(case, sequences, types), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_qwen3_as_transformers(causal):
    config = replace(QWEN3, causal=causal)
    torch.manual_seed(1)
    oracle = HfQwen3(
        Qwen3Config(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        )
    ).eval()
    for name, tensor in oracle.named_parameters():
        tensor.data = torch.randn_like(tensor) * 0.3 + (1.0 if "norm" in name else 0.0)
    sequences = random_sequences(config, [9, 1, 60])
    vectors = reference_vectors(config, MappedWeights(oracle.state_dict(), "memory"), sequences)
    for row, ids in enumerate(sequences):
        mask = None if causal else torch.zeros(1, 1, len(ids), len(ids))
        with torch.no_grad():
            hidden = oracle(torch.from_numpy(ids).long()[None], attention_mask=mask).last_hidden_state[0]
        torch.testing.assert_close(vectors[row], hidden.mean(0), rtol=1e-3, atol=1e-4)


def test_an_empty_sequence_is_zeros_and_moves_no_other():
    case = make_case(BERT)
    some = random_sequences(BERT, [4, 6])
    with_empty = reference_vectors(BERT, case.weights, [some[0], np.empty(0, np.int32), some[1]])
    assert not with_empty[1].any()
    assert least_cosine(with_empty[[0, 2]], reference_vectors(BERT, case.weights, some)) > 0.9999999
