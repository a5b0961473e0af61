"""Whole forwards of Qwen3 and BERT through the Triton kernels, split-K and fused products included.

What a GPU runs, without one: the interpreter's kernels are wired as on the device. In fp32, because the
interpreter multiplies no bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from unittest.mock import Mock

import pytest
import torch

from rose.attention.base import AttentionBackend, AttentionSpec
from rose.attention.flat import FlatAttention, FlatProductAttention
from rose.attention.sdpa import SdpaAttention
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels import absorbed, dispatch, gemm
from rose.kernels.gemm import GemmChoice, GemmPlan
from rose.kernels.jit import absorbed as jit_absorbed
from rose.layers import decoder, encoder, linear, projection, token_qkv
from rose.models.bert import BertModel
from rose.models.qwen3 import Qwen3Model
from rose.models.registry import Model
from rose.reference import reference_vectors
from rose.weights import DummyWeights

CONFIG = ModelConfig(
    architecture="qwen3",
    task="embed",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=50,
    max_positions=32,
    norm_eps=1e-6,
    max_model_len=32,
    quantizer="tanh_int8",
    rope_theta=1e6,
)
CPU = torch.device("cpu")
OFFSETS = [0, 2, 2, 5]
PADDED_TOKENS = 7


class LargeWeights(DummyWeights):
    """Weights large enough that every layer moves the result."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().tensor(name, shape)
        return tensor if "norm" in name else tensor * 10


# Three layers: one that a table serves, one between, one that picks rows.
BERT = replace(
    CONFIG,
    architecture="bert",
    num_layers=3,
    num_kv_heads=4,
    norm_eps=1e-12,
    quantizer=None,
    rope_theta=None,
    type_vocab_size=2,
    pooling="cls",
)
LAST = replace(CONFIG, causal=True, pooling="last")
MODELS = {
    "qwen3": CONFIG,
    "qwen3-last": LAST,
    "bert": BERT,
    "bert-mean": replace(BERT, pooling="mean"),
    "bert-absorbed": replace(BERT, intermediate_size=256),  # wide enough for scratch
}
# Each with other products, so that norm and rotation meet every kind of them.
ATTENTION = {"cublas": FlatAttention, "split-k": FlatProductAttention, "fused": SdpaAttention}


def _table(keys: Sequence[gemm.WeightKey], plan_of: str) -> dict[gemm.WeightKey, list[GemmChoice]]:
    if plan_of == "cublas":
        return {}
    split = GemmPlan(2, 16, 32, 16, 2, 4)
    plans = {
        key: replace(split, splits=1, fused=key[2]) if plan_of == "fused" and key[2] != "sum" else split
        for key in keys
    }
    return {key: [GemmChoice(16, plan)] for key, plan in plans.items()}


def _model(config: ModelConfig, weights: DummyWeights, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Wired as on a device: activations that were made before, partial sums, kernels, plain weights."""
    if config.architecture == "qwen3":
        with monkeypatch.context() as patch:
            patch.setattr(linear, "_prepack", lambda weight: None)
            qwen = Qwen3Model(config, weights, torch.float32, CPU, PADDED_TOKENS)
        partials = max(map(gemm.partial_elements, decoder.weight_keys(config)))
        monkeypatch.setattr(qwen._workspace, "_partial_elements", partials)
        return qwen
    with monkeypatch.context() as patch:
        # As for a weight on a GPU: the bias is left to the kernel that normalises.
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(linear, "_prepack", lambda weight: None)
        bert = BertModel(config, weights, torch.float32, CPU, PADDED_TOKENS)
    bert._on_cpu = False
    bert._buffers = encoder.EncoderBuffers.allocate(config, PADDED_TOKENS, torch.float32, CPU)
    return bert


def _forward(model: Model, filler: int, kind: Callable[[AttentionSpec], AttentionBackend]) -> Outputs:
    """One padded batch; padded rows hold the id `filler`."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.full((PADDED_TOKENS,), filler, dtype=torch.int32)
    ids[: OFFSETS[-1]] = torch.randint(0, 50, (OFFSETS[-1],), generator=generator).int()
    cu_seqlens = torch.tensor(OFFSETS).int()
    attention = kind(model.attention_spec)
    attention.plan(cu_seqlens.numpy())
    shape = (len(OFFSETS) - 1, CONFIG.hidden_size)
    int8 = torch.full(shape, 77, dtype=torch.int8) if model.config.quantizer else None
    outputs = Outputs(torch.full(shape, float("nan")), int8)
    model.forward(DeviceBatch(ids, cu_seqlens, None, cu_seqlens.numpy(), 5, attention), outputs)
    return outputs


def _absorbing(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Makes the last layer absorb its projections for so few tokens, too; the calls of the kernels for it."""
    monkeypatch.setattr(absorbed, "MIN_TOKENS", 1)
    monkeypatch.setattr(absorbed, "MIN_LENGTH", 1)
    spy = Mock(wraps=jit_absorbed.absorbed_attention)
    monkeypatch.setattr(jit_absorbed, "absorbed_attention", spy)
    return spy


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real thing")
@pytest.mark.parametrize(
    ("name", "plan_of"),
    [
        *product(("qwen3", "bert"), ATTENTION),
        *product(("qwen3-last", "bert-mean", "bert-absorbed"), ("split-k",)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in product(("qwen3-last", "bert-mean", "bert-absorbed"), ("cublas", "fused"))
        ),
    ],
)
def test_forward_through_triton(name, plan_of, monkeypatch):
    config, weights = MODELS[name], LargeWeights(2)
    keys = (decoder if config.architecture == "qwen3" else encoder).weight_keys(config)
    monkeypatch.setattr(dispatch, "uses_triton", lambda x: True)
    monkeypatch.setattr(projection, "uses_table", lambda weight: True)
    monkeypatch.setattr(gemm, "table", lambda: _table(keys, plan_of))
    monkeypatch.setattr(token_qkv, "_has_room", lambda embeddings, width: plan_of != "fused")
    absorbing = _absorbing(monkeypatch) if name == "bert-absorbed" else None
    model = _model(config, weights, monkeypatch)
    kind = ATTENTION[plan_of]
    outputs = _forward(model, 0, kind)

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (OFFSETS[-1],), generator=generator).int().numpy()
    sequences = [tokens[start:end] for start, end in pairwise(OFFSETS)]
    expected = reference_vectors(config, weights, sequences)
    torch.testing.assert_close(outputs.vectors, expected, rtol=1e-3, atol=1e-4)
    if outputs.int8 is not None:
        assert (outputs.int8.float() - torch.tanh(expected) * 127).abs().max() <= 0.51
    if plan_of == "split-k":
        assert torch.equal(outputs.vectors, _forward(model, 49, kind).vectors)
    if absorbing is not None:
        out = absorbing.call_args.args[-1]
        assert out.scratch.data_ptr() == model._buffers.wide.data_ptr()
