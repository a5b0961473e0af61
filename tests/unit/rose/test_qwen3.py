"""The Qwen3 model on a CPU, against transformers and against the plain reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config
from transformers import Qwen3Model as HfQwen3

from rose.attention.sdpa import SdpaAttention
from rose.batch import RaggedBatch
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.errors import ModelLoadError
from rose.models.qwen3 import Qwen3Model
from rose.reference import reference_vectors
from rose.weights import MappedWeights

CPU = torch.device("cpu")
# head_dim is not hidden / heads; two query heads share a key head; nothing is a power of two but head_dim.
CONFIG = ModelConfig(
    architecture="qwen3",
    task="embed",
    hidden_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    vocab_size=101,
    max_positions=64,
    norm_eps=1e-6,
    max_model_len=64,
    pooling="mean",
    quantizer="tanh_int8",
    causal=False,
    rope_theta=1e6,
)
CAUSAL = replace(CONFIG, causal=True, pooling="last", quantizer=None)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """Random weights of a size at which attention and norms matter, norms away from 1."""
    torch.manual_seed(5)
    model = HfQwen3(_hf_config())
    for name, tensor in model.named_parameters():
        scale = 0.3 if "norm" in name else tensor.shape[-1] ** -0.5
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if "norm" in name else 0.0)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _hf_config() -> Qwen3Config:
    return Qwen3Config(
        hidden_size=CONFIG.hidden_size,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        intermediate_size=CONFIG.intermediate_size,
        vocab_size=CONFIG.vocab_size,
        max_position_embeddings=CONFIG.max_positions,
        rms_norm_eps=CONFIG.norm_eps,
        rope_parameters={"rope_theta": CONFIG.rope_theta, "rope_type": "default"},
        attn_implementation="sdpa",
    )


def _sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, length).astype(np.int32) for length in lengths]


def _model(config: ModelConfig, state: dict[str, torch.Tensor]) -> Qwen3Model:
    return Qwen3Model(config, MappedWeights(state, "memory"), torch.float32, CPU, 256)


def _run(model: Qwen3Model, sequences: list[np.ndarray], empty: int = 0) -> Outputs:
    batch = RaggedBatch.pack(sequences)
    offsets = np.pad(batch.cu_seqlens, (0, empty), mode="edge")
    attention = SdpaAttention(model.attention_spec)
    attention.plan(offsets)
    vectors = torch.full((batch.num_seqs + empty, CONFIG.hidden_size), float("nan"))
    int8 = torch.full(vectors.shape, 77, dtype=torch.int8) if model.config.quantizer else None
    outputs = Outputs(vectors, int8)
    with torch.inference_mode():
        model.forward(
            DeviceBatch(
                input_ids=torch.from_numpy(batch.input_ids),
                cu_seqlens=torch.from_numpy(offsets),
                token_type_ids=None,
                host_cu_seqlens=offsets,
                max_seqlen=max(map(len, sequences)),
                attention=attention,
            ),
            outputs,
        )
    return outputs


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).min().item()


@pytest.mark.parametrize("config", [CONFIG, CAUSAL], ids=["bidirectional-mean", "causal-last"])
def test_same_vectors_as_transformers(config, state):
    sequences = _sequences([1, 7, 64, 2, 33])
    hf = HfQwen3(_hf_config()).eval()
    hf.load_state_dict(state)
    expected = []
    with torch.no_grad():
        for ids in sequences:
            mask = None if config.causal else torch.zeros(1, 1, len(ids), len(ids))
            hidden = hf(torch.from_numpy(ids).long()[None], attention_mask=mask).last_hidden_state[0]
            expected.append(hidden[-1] if config.pooling == "last" else hidden.mean(0))
    vectors = _run(_model(config, state), sequences).vectors
    torch.testing.assert_close(vectors, torch.stack(expected), rtol=1e-3, atol=1e-4)
    assert _cosine(vectors, torch.stack(expected)) >= 0.99999


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("causal", [False, True])
def test_same_vectors_as_the_reference(causal, pooling, state):
    config = replace(CONFIG, causal=causal, pooling=pooling)
    sequences = _sequences([5, 1, 40])
    expected = reference_vectors(config, MappedWeights(state, "memory"), sequences)
    outputs = _run(_model(config, state), sequences)
    torch.testing.assert_close(outputs.vectors, expected, rtol=1e-3, atol=1e-4)
    assert (outputs.int8.float() - torch.tanh(expected) * 127).abs().max() <= 0.51


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(0, 99))
def test_alone_as_packed(state, lengths, seed):
    model, sequences = _model(CAUSAL, state), _sequences(lengths, seed)
    packed = _run(model, sequences).vectors
    alone = torch.cat([_run(model, [sequence]).vectors for sequence in sequences])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_more_sequences_than_rows(pooling, state):
    """Padding with empty sequences may make so many; every vector is still its own, and theirs are zero."""
    model = _model(replace(CAUSAL, pooling=pooling), state)
    sequences = _sequences([1, 2])
    few, many = _run(model, sequences).vectors, _run(model, sequences, empty=3).vectors
    assert many.shape[0] == 5 > sum(map(len, sequences))
    torch.testing.assert_close(many[:2], few, rtol=1e-4, atol=1e-5)
    assert not many[2:].any() and few.all()


def test_picked_rows_lie_apart_from_all_rows(state):
    """On a GPU programs copy in any order: where one writes, another may not still have to read."""
    rows = _model(CAUSAL, state)._workspace.rows(40)
    for num_seqs in (1, 40):
        picked = rows.picked(num_seqs)
        places = [_place(tensor) for tensor in (picked.context, picked.residual, rows.qkv, rows.residual)]
        places.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        start, end = _place(picked.hidden)  # first written when all is copied
        assert all(
            end <= other[0] or other[1] <= start for other in map(_place, (picked.context, picked.residual))
        )
        assert picked.context.shape == (num_seqs, rows.context.shape[1]) and picked.context.is_contiguous()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_prefix_of_a_causal_sequence_gives_the_prefix(state):
    """The causal model's hidden states do not see later tokens; the bidirectional one's do."""
    long = _sequences([20])[0]
    for config, equal in ((replace(CAUSAL, pooling="cls"), True), (replace(CONFIG, pooling="cls"), False)):
        model = _model(config, state)
        vectors = [_run(model, [ids]).vectors for ids in (long, long[:9])]
        assert torch.allclose(*vectors, rtol=1e-4, atol=1e-5) == equal


def test_names_may_have_the_model_prefix(state):
    prefixed = {f"model.{name}": tensor for name, tensor in state.items()}
    sequences = _sequences([4, 9])
    plain, other = (_run(_model(CONFIG, tensors), sequences).vectors for tensors in (state, prefixed))
    assert torch.equal(plain, other)


def test_missing_weight_is_named(state):
    partial = {name: tensor for name, tensor in state.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        _model(CONFIG, partial)


def test_more_tokens_than_the_workspace_holds_are_refused(state):
    with pytest.raises(ValueError, match="batch has 257 tokens; the workspace holds 256"):
        _run(_model(CONFIG, state), _sequences([64, 64, 64, 64, 1]))


def test_checkpoint_in_another_dtype_is_cast(state):
    """bf16 weights run in fp32: as near to the fp32 model as bf16 rounding of the weights allows."""
    rounded = {name: tensor.bfloat16() for name, tensor in state.items()}
    sequences = _sequences([12, 30])
    plain, other = (_run(_model(CONFIG, tensors), sequences).vectors for tensors in (state, rounded))
    assert other.dtype == torch.float32
    assert 0.999 < _cosine(plain, other) < 1.0
