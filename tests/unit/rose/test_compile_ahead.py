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
from rose.kernels.absorbed import MIN_LENGTH, MIN_TOKENS
from rose.layers.compile_ahead import NoAttention, _empty_step, compile_ahead, row_counts
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
    batch, outputs = _empty_step(model, BatchShape(16, 2, 16), NoAttention())
    with torch.inference_mode():
        model.forward(batch, outputs)
    assert outputs.vectors.shape == (2, config.dimensions)
    assert (outputs.int8 is not None) == (config.quantizer is not None)


@pytest.mark.parametrize("num_types", [1, 2, 3])
def test_the_empty_step_has_token_types_where_batches_have_them(num_types: int) -> None:
    config = replace(BERT, type_vocab_size=num_types)
    model = BertModel(config, dummy_weights(config, 0, CPU), torch.float32, CPU, 32)
    types = _empty_step(model, BatchShape(16, 2, 16), NoAttention())[0].token_type_ids
    if num_types == 1:
        assert types is None
    else:
        assert types is not None and torch.equal(types, torch.zeros(16, dtype=torch.int32))


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


@pytest.mark.parametrize(("kind", "absorbs"), [("mean", False), ("first", True), ("splade", False)])
def test_a_last_layer_that_absorbs_is_compiled_for_short_sequences_too(
    monkeypatch: pytest.MonkeyPatch, kind: str, absorbs: bool
) -> None:
    """For so short ones that it does not; nor does it for few tokens."""
    compiler = pytest.importorskip("rose.kernels.jit.compile")
    model = BertModel(KINDS[kind], dummy_weights(KINDS[kind], 0, CPU), torch.float32, CPU, 32)
    short: set[int] = set()

    def forward(batch: DeviceBatch, outputs: Outputs) -> None:
        if batch.num_tokens < batch.num_seqs * MIN_LENGTH:
            short.add(batch.num_tokens)

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(dispatch, "uses_triton", lambda x: True)
    monkeypatch.setattr(compiler, "compiling", lambda threads: nullcontext())
    compile_ahead(model, [MIN_TOKENS - 1, MIN_TOKENS, 4096])
    assert short == ({MIN_TOKENS, 4096} if absorbs else set())
