"""A whole Qwen3 forward through the Triton kernels, split-K and fused SwiGLU products included.

What a GPU runs, without one: the interpreter's kernels are wired as on the device. In fp32, because the
interpreter multiplies no bf16.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rose.attention.sdpa import SdpaAttention
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels import dispatch, gemm
from rose.kernels.gemm import GemmChoice, GemmPlan
from rose.layers import projection
from rose.layers.decoder import weight_keys
from rose.models.qwen3 import Qwen3Model
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
    hidden_act="silu",
    max_model_len=32,
    quantizer="tanh_int8",
    rope_theta=1e6,
)
OFFSETS = [0, 2, 2, 5]
PADDED_TOKENS = 7


class LargeWeights(DummyWeights):
    """Weights large enough that every layer moves the result."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().tensor(name, shape)
        return tensor if "norm" in name else tensor * 10


def _table(plan_of: str) -> dict[gemm.WeightKey, list[GemmChoice]]:
    whole, split = GemmPlan(1, 16, 32, 16, 2, 4), GemmPlan(2, 16, 32, 16, 2, 4)
    fused = GemmPlan(1, 16, 32, 16, 2, 4, swiglu=True)
    plan = whole if plan_of == "swiglu" else split
    table = {key: [GemmChoice(16, plan)] for key in weight_keys(CONFIG)}
    if plan_of == "swiglu":
        table[192, 64, True] = [GemmChoice(16, fused)]
    return {} if plan_of == "cublas" else table


def _forward(model: Qwen3Model, filler: int) -> Outputs:
    """One padded batch; padded rows hold the id `filler`."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.full((PADDED_TOKENS,), filler, dtype=torch.int32)
    ids[: OFFSETS[-1]] = torch.randint(0, 50, (OFFSETS[-1],), generator=generator).int()
    cu_seqlens = torch.tensor(OFFSETS).int()
    attention = SdpaAttention(model.attention_spec)
    attention.plan(cu_seqlens.numpy(), PADDED_TOKENS, 0)
    shape = (len(OFFSETS) - 1, CONFIG.hidden_size)
    outputs = Outputs(torch.full(shape, float("nan")), torch.full(shape, 77, dtype=torch.int8))
    model.forward(DeviceBatch(ids, cu_seqlens, None, cu_seqlens.numpy(), 5, attention), outputs)
    return outputs


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real thing")
@pytest.mark.parametrize("plan_of", ["cublas", "split-k", "swiglu"])
def test_forward_through_triton(plan_of, monkeypatch):
    monkeypatch.setattr(dispatch, "uses_triton", lambda x: True)
    monkeypatch.setattr(projection, "uses_table", lambda weight: True)
    monkeypatch.setattr(gemm, "table", lambda: _table(plan_of))
    weights = LargeWeights(2)
    model = Qwen3Model(CONFIG, weights, torch.float32, torch.device("cpu"), PADDED_TOKENS)
    partials = max(map(gemm.partial_elements, weight_keys(CONFIG)))
    monkeypatch.setattr(model._workspace, "_partial_elements", partials)
    outputs = _forward(model, 0)

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (OFFSETS[-1],), generator=generator).int().numpy()
    sequences = [tokens[start:end] for start, end in pairwise(OFFSETS)]
    expected = reference_vectors(CONFIG, weights, sequences)
    torch.testing.assert_close(outputs.vectors, expected, rtol=1e-3, atol=1e-4)
    assert (outputs.int8.float() - torch.tanh(expected) * 127).abs().max() <= 0.51
    if plan_of == "split-k":
        assert torch.equal(outputs.vectors, _forward(model, 49).vectors)
