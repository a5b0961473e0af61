"""Encoders with windows as on a GPU: padded rows of attention hold anything, and global layers read them."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rose.attention.base import AttentionSpec
from rose.attention.sdpa import SdpaAttention
from rose.batch import Int32
from rose.config import ModelConfig, load_config
from rose.device_batch import DeviceBatch, Outputs
from rose.layers import rotary
from rose.models.registry import build_model
from rose.reference import reference_vectors
from rose.weights import DummyWeights, dummy_weights
from tests.unit.rose.bert_cases import CPU, random_sequences

PRESETS = Path(rotary.__file__).parents[1] / "presets"
PADDED_TOKENS = 24
LENGTHS = (9, 1, 7)


def small(alias: str) -> ModelConfig:
    """Seven layers of the preset's kinds, windows of 3 places."""
    config = load_config(PRESETS / alias)
    windows = tuple(None if window is None else 3 for window in config.windows[:7])
    return replace(
        config,
        hidden_size=64,
        num_layers=7,
        num_heads=4,
        num_kv_heads=2 if config.num_kv_heads < config.num_heads else 4,
        head_dim=16,
        intermediate_size=96,
        vocab_size=50,
        max_positions=32,
        max_model_len=32,
        windows=windows,
        dense=(),
    )


def over_all_rows(
    spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """As FlashAttention: hidden keys get the weight 0, and 0 * NaN is NaN. Padded rows come out as NaN."""
    del max_seqlen
    q, k, v = qkv
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    places, out = torch.arange(len(q)), torch.full_like(q, float("nan"))
    for start, end in pairwise(cu_seqlens.tolist()):
        seen = ((places >= start) & (places < end)).expand(end - start, -1)
        if spec.window is not None:
            seen = seen & ((places - places[start:end, None]).abs() <= spec.window)
        scores = torch.einsum("ihd,jhd->hij", q[start:end], k) * spec.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hij,jhd->ihd", weights, v)
    return out


class ReadsOn:
    """A backend for global layers that reads rows past the last sequence and writes none."""

    name = "reads-on"
    capturable = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def plan(self, host_cu_seqlens: Int32) -> None:
        """Nothing to do."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> None:
        """Real rows only."""
        real = int(cu_seqlens[-1])
        out[:real] = over_all_rows(self._spec, (q, k, v), cu_seqlens, max_seqlen)[:real]


def scaled(weights: DummyWeights, factor: float) -> DummyWeights:
    """Matrices `factor` times as large, so that narrow layers move the result as wide ones do."""
    plain = weights.tensor
    weights.tensor = lambda name, shape: plain(name, shape) * (factor if len(shape) == 2 else 1.0)
    return weights


@pytest.mark.parametrize("alias", ["modernbert-embed", "embeddinggemma"])
def test_nan_in_padded_rows_of_a_window_reaches_no_vector(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "SdpaAttention", functools.partial(SdpaAttention, kernel=over_all_rows))
    config = small(alias)
    assert {None, 3} == {*config.windows}
    weights = scaled(dummy_weights(config, 1), 8.0)
    model = build_model(config, weights, torch.float32, CPU, PADDED_TOKENS)
    rows = model._memory.rows(PADDED_TOKENS)
    monkeypatch.setattr(model._memory, "rows", lambda num_tokens: rows)  # kept between forwards, as on a GPU
    offsets = np.cumsum([0, *LENGTHS, 0], dtype=np.int32)
    cu_seqlens = torch.from_numpy(offsets)
    for seed in (1, 2):
        sequences = random_sequences(config, LENGTHS, seed)
        ids = torch.full((PADDED_TOKENS,), 7, dtype=torch.int32)
        ids[: offsets[-1]] = torch.from_numpy(np.concatenate(sequences))
        outputs = Outputs(torch.full((len(LENGTHS) + 1, config.hidden_size), float("nan")))
        batch = DeviceBatch(ids, cu_seqlens, None, offsets, 9, ReadsOn(model.attention_spec))
        with torch.inference_mode():
            model._run(batch, outputs)
        expected = reference_vectors(config, weights, sequences)
        torch.testing.assert_close(outputs.vectors[:-1], expected, rtol=1e-3, atol=1e-4)
