"""The empty step that compiles a model's kernels at start must fit the model, whatever its vectors are."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rose.attention.base import BatchShape, Fp8Attention
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels import dispatch
from rose.layers.compile_ahead import _empty_step, _NoAttention, compile_ahead, row_counts
from rose.models.bert import BertModel
from rose.weights import dummy_weights
from tests.unit.rose.bert_cases import BERT, CPU

KINDS = {
    "mean": BERT,
    "first": replace(BERT, pooling="cls"),
    "splade": replace(BERT, pooling="splade", task="sparse"),
    "quantized": replace(BERT, quantizer="tanh_int8"),
}


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_the_empty_step_fits_the_model(config: ModelConfig) -> None:
    model = BertModel(config, dummy_weights(config, 0, CPU), torch.float32, CPU, 32)
    batch, outputs = _empty_step(model, BatchShape(16, 2, 16), _NoAttention())
    with torch.inference_mode():
        model.forward(batch, outputs)
    assert outputs.vectors.shape == (2, config.dimensions)
    assert (outputs.int8 is not None) == (config.quantizer is not None)


def test_row_counts_end_at_the_largest_batch_and_pass_every_power_of_two() -> None:
    counts = row_counts([], 3000)
    assert counts[-1] == 3000
    assert {1 << power for power in range(12)} <= set(counts)
    assert counts == sorted(set(counts))


def test_heads_in_fp8_are_compiled_where_a_model_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("rose.kernels.jit.compile")
    model = BertModel(BERT, dummy_weights(BERT, 0, CPU), torch.float32, CPU, 32)
    asked: list[bool] = []
    monkeypatch.setattr(
        model, "forward", lambda batch, outputs: asked.append(isinstance(batch.attention, Fp8Attention))
    )
    monkeypatch.setattr(dispatch, "uses_triton", lambda x: True)
    monkeypatch.setattr(compiler, "compiling", lambda threads: nullcontext())
    compile_ahead(model, [16, 32])
    assert asked == [False, False]
    model.attention_spec = replace(model.attention_spec, fp8=True)
    asked.clear()
    compile_ahead(model, [16, 32])
    assert asked == [False, True, False, True]


@pytest.mark.parametrize(("kind", "steps"), [("mean", 1), ("first", 2), ("splade", 1)])
def test_a_pooling_of_single_rows_is_compiled_for_all_rows_too(
    monkeypatch: pytest.MonkeyPatch, kind: str, steps: int
) -> None:
    """Which is what it reads when tokens give something; a mean reads all rows anyway."""
    compiler = pytest.importorskip("rose.kernels.jit.compile")
    model = BertModel(KINDS[kind], dummy_weights(KINDS[kind], 0, CPU), torch.float32, CPU, 32)
    wanted: list[set[str]] = []

    def forward(batch: DeviceBatch, outputs: Outputs) -> None:
        wanted.append(set(outputs.tokens))

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(dispatch, "uses_triton", lambda x: True)
    monkeypatch.setattr(compiler, "compiling", lambda threads: nullcontext())
    compile_ahead(model, [16, 32])
    assert wanted == [set(), {"hidden"}][:steps] * 2
