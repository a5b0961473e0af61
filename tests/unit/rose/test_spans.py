"""Rows that are means of parts of sequences: one forward over the whole, as late chunking wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules.dense import Dense
from transformers import (
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    Qwen3Config,
    Qwen3Model,
)

from rose.batch import Int32, RaggedBatch
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from rose.errors import StepError
from rose.limits import StepLimits
from tests.unit.rose.parity import add_modules, oracle_hidden, pooling_config, resized, save_oracle

CHUNKS = [(0, 5), (6, 7), (8, 20), (20, 20), (0, 20), (3, 9)]


def spans(*bounds: tuple[int, int]) -> Int32:
    return np.array(bounds, np.int32)


def _bert() -> Any:
    sizes = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 92}
    return BertModel(BertConfig(**sizes, vocab_size=101, max_position_embeddings=64), add_pooling_layer=False)


def _context() -> Any:
    """pplx-embed-context's architecture: Qwen3 whose tokens see each other."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
    config = Qwen3Config(
        **sizes,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=101,
        max_position_embeddings=64,
        use_bidirectional_attention=True,
        sep_token_id=100,
        architectures=["PPLXQwen3ContextualModel"],
    )
    return Qwen3Model(config)


def _save(make: Callable[[], Any], folder: Path) -> Any:
    torch.manual_seed(2)
    model = make().eval()
    for name, tensor in model.named_parameters():
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if "norm" in name.lower() else 0.0)
    model.save_pretrained(folder)
    config = (folder / "config.json").read_text().replace('"Qwen3Model"', '"PPLXQwen3ContextualModel"')
    (folder / "config.json").write_text(config)
    return model


def _hidden(model: Any, ids: Int32) -> torch.Tensor:
    """f32[n, H] of one sequence, every token seeing every other."""
    mask = torch.zeros(1, 1, len(ids), len(ids))
    with torch.no_grad():
        hidden = model(torch.from_numpy(ids)[None].long(), attention_mask=mask).last_hidden_state[0]
    return hidden.double()


@pytest.mark.parametrize("make", [_bert, _context])
def test_a_span_is_the_mean_of_its_tokens_within_the_whole(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Sequences out of order of length, so that the CPU path sorts them and must move the spans along."""
    model, rng = _save(make, tmp_path), np.random.default_rng(0)
    sequences = [rng.integers(2, 100, length, dtype=np.int32) for length in (20, 7, 3, 12)]
    parts = [spans(*CHUNKS), None, spans((0, 0), (1, 3), (3, 3)), None]
    engine = load_engine(tmp_path, EngineOptions(device="cpu", num_threads=1), dummy=False, model_name="m")
    try:
        result = engine.step(RaggedBatch.pack(sequences, None, parts)).result()
    finally:
        engine.close()
    expected = []
    for ids, own in zip(sequences, parts, strict=True):
        hidden = _hidden(model, ids)
        bounds = [(0, len(ids))] if own is None else own.tolist()
        expected += [
            hidden[start:end].mean(0) if end > start else hidden.new_zeros(()) for start, end in bounds
        ]
    stacked = torch.stack([row.expand(model.config.hidden_size) for row in expected])
    assert result.vectors.shape == (len(CHUNKS) + 1 + 3 + 1, model.config.hidden_size)
    np.testing.assert_allclose(result.vectors, stacked.numpy(), atol=2e-5)
    if result.int8 is not None:
        assert not result.int8[3].any()
        assert np.abs(result.int8[0] - np.round(np.tanh(stacked[0].numpy()) * 127)).max() <= 1
    assert engine.info.chunk_separator == (100 if make is _context else None)


def _encoders() -> dict[str, Any]:
    windows: dict[str, Any] = {"local_attention": 16, "cls_token_id": 2}
    gemma: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": 16}
    return {
        "nomic": NomicBertModel(resized(NomicBertConfig)),
        "modernbert": ModernBertModel(resized(ModernBertConfig, **windows)),
        "gemma": Gemma3TextModel(resized(Gemma3TextConfig, use_bidirectional_attention=True, **gemma)),
    }


@pytest.mark.parametrize("family", _encoders())
def test_spans_of_encoders_with_windows_and_a_dense_module(tmp_path: Path, family: str) -> None:
    """Each span's mean goes through what follows the pooling, as a sequence's does."""
    model, rng = _encoders()[family], np.random.default_rng(0)
    folder = save_oracle(tmp_path, model)
    dense = Dense(60, 20)
    add_modules(folder, {"1_Pooling": pooling_config("mean", 60), "2_Dense": {}})
    dense.save(str(folder / "2_Dense"))
    sequences = [rng.integers(2, 100, length, dtype=np.int32) for length in (40, 7, 90)]
    parts = [spans((0, 9), (9, 40)), spans((6, 7)), spans((0, 90), (30, 31))]
    engine = load_engine(folder, EngineOptions(device="cpu", num_threads=1), dummy=False, model_name="m")
    try:
        vectors = engine.step(RaggedBatch.pack(sequences, None, parts)).result().vectors
    finally:
        engine.close()
    means = torch.stack(
        [
            oracle_hidden(model, ids)[start:end].mean(0)
            for ids, own in zip(sequences, parts, strict=True)
            for start, end in own.tolist()
        ]
    )
    with torch.no_grad():
        expected = dense({"sentence_embedding": means})["sentence_embedding"]
    np.testing.assert_allclose(vectors, expected.numpy(), atol=1e-4)


def test_packing_moves_spans_to_their_sequences() -> None:
    sequences = [np.zeros(length, np.int32) for length in (4, 2, 3)]
    batch = RaggedBatch.pack(sequences, None, [None, spans((0, 1), (1, 2)), spans((3, 3))])
    assert batch.spans is not None
    assert batch.spans.tolist() == [[0, 4], [4, 5], [5, 6], [9, 9]]
    assert (batch.num_seqs, batch.num_rows) == (3, 4)
    assert RaggedBatch.pack(sequences).num_rows == 3


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (spans((0, 5)), "does not lie within one sequence"),
        (spans((0, 4), (3, 2)), "span 3..2 does not"),
        (spans((-1, 2)), "span -1..2"),
        (spans((6, 8)), "span 6..8"),
        (spans((8, 8)), "span 8..8"),
        (np.zeros((0, 2), np.int32), r"shape \[0, 2\]"),
        (np.zeros((9, 2), np.int32), r"shape \[9, 2\]"),
        (np.zeros((2, 3), np.int32), r"shape \[2, 3\]"),
    ],
)
def test_spans_that_make_no_sense_are_refused(bounds: Int32, message: str) -> None:
    limits = StepLimits(64, 8, 32, 10, 0, has_spans=True)
    batch = replace(RaggedBatch.pack([np.zeros(4, np.int32), np.zeros(3, np.int32)]), spans=bounds)
    with pytest.raises(StepError, match=message):
        limits.check(batch)


def test_spans_at_the_edges_are_taken() -> None:
    limits = StepLimits(64, 8, 32, 10, 0, has_spans=True)
    batch = RaggedBatch.pack([np.zeros(4, np.int32), np.zeros(3, np.int32)])
    assert limits.check(replace(batch, spans=spans((0, 4), (4, 7), (4, 4), (7, 7), (0, 0)))) == 4


def test_models_that_pool_otherwise_take_no_spans() -> None:
    batch = RaggedBatch.pack([np.zeros(4, np.int32)], None, [spans((0, 2))])
    with pytest.raises(StepError, match="does not pool by mean"):
        StepLimits(64, 8, 32, 10, 0).check(batch)
