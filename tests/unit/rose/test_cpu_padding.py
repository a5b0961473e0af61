"""Padding on a CPU: products see few numbers of rows, and no result knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.attention.sdpa import SdpaAttention
from rose.batch import BatchResult, EngineInfo, Int32, RaggedBatch, TokenOutput
from rose.buckets import row_bucket, row_buckets
from rose.config import load_config
from rose.cpu_engine import CpuEngine
from rose.device_batch import DeviceBatch, Outputs
from rose.layers import linear
from rose.limits import StepLimits
from rose.models.registry import Model, build_model
from rose.weights import DummyWeights
from tests.unit.rose.bert_cases import CPU

PRESETS = Path(linear.__file__).parents[1] / "presets"
# Mean, first and last token; BERT, Qwen3 and rotary encoders, of which the last has windows.
ALIASES = ("minilm", "bge-small", "pplx-embed", "qwen3-embedding", "nomic-embed", "modernbert-embed")
MAX_TOKENS, MAX_SEQS, VOCAB, SIZE = 200, 24, 40, 32
PADDING_ID = 0


class Poisoned(DummyWeights):
    """Random weights at which attention matters; whatever a padded row is embedded as is NaN."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource.tensor."""
        tensor = super().tensor(name, shape)
        if len(shape) == 2:
            tensor = tensor * 8.0
        if shape == (VOCAB, SIZE):
            tensor[PADDING_ID] = float("nan")
        return tensor


@dataclass(frozen=True)
class Served:
    """A model, and an engine that runs it."""

    model: Model
    engine: CpuEngine

    def padded(self, batch: RaggedBatch) -> BatchResult:
        """What the engine makes of a batch."""
        return self.engine.step(batch).result()

    def plain(self, batch: RaggedBatch) -> Outputs:
        """What the model makes of it without any padding."""
        spans = None if batch.spans is None else torch.from_numpy(batch.spans).t()
        tokens = {kind: torch.zeros(batch.num_tokens, SIZE) for kind in batch.token_outputs}
        outputs = Outputs(torch.zeros(batch.num_rows, SIZE), tokens=tokens)
        device_batch = DeviceBatch(
            input_ids=torch.from_numpy(batch.input_ids),
            cu_seqlens=torch.from_numpy(batch.cu_seqlens),
            token_type_ids=None,
            host_cu_seqlens=batch.cu_seqlens,
            max_seqlen=int(np.diff(batch.cu_seqlens).max()),
            attention=SdpaAttention(self.model.attention_spec),
            spans=spans,
        )
        with torch.inference_mode():
            self.model.forward(device_batch, outputs)
        return outputs


def serve(alias: str) -> Served:
    """The preset's architecture and pooling, small."""
    config = load_config(PRESETS / alias)
    config = replace(
        config,
        hidden_size=SIZE,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2 if config.num_kv_heads < config.num_heads else 4,
        head_dim=16 if config.num_kv_heads < config.num_heads else 8,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_positions=MAX_TOKENS,
        max_model_len=MAX_TOKENS,
        windows=(None, 3) if config.windows else (),
        quantizer=None,
        dense=(),
    )
    model = build_model(config, Poisoned(3), torch.float32, CPU, MAX_TOKENS)
    limits = (MAX_TOKENS, MAX_TOKENS, MAX_SEQS)
    info = EngineInfo(
        alias, "", "", "cpu", SIZE, VOCAB, *limits, config.pooling, False, token_outputs=config.token_outputs
    )
    step = StepLimits(
        MAX_TOKENS, MAX_SEQS, MAX_TOKENS, VOCAB, 0, has_spans=True, token_bytes={"hidden": 4 * SIZE}
    )
    step = replace(step, max_token_bytes=1 << 20)
    return Served(model, CpuEngine(model, SdpaAttention(model.attention_spec), info, step, num_threads=1))


@pytest.fixture(scope="module", params=ALIASES)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    served = serve(request.param)
    served.engine._new_rows.clear()  # or products for other numbers of rows would run between steps
    yield served
    served.engine.close()


@pytest.fixture(scope="module")
def seen() -> Iterator[set[int]]:
    """The numbers of rows of all products so far."""
    rows: set[int] = set()

    def watched(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(self: object, x: torch.Tensor, *more: object) -> torch.Tensor:
            rows.add(len(x))
            return product(self, x, *more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_fused", "add"):
            patch.setattr(linear.Linear, name, watched(getattr(linear.Linear, name)))
        yield rows


def batch_of(lengths: list[int], **more: Any) -> RaggedBatch:
    ids = np.random.default_rng(sum(lengths)).integers(1, VOCAB, sum(lengths), dtype=np.int32)
    sequences: list[Int32] = np.split(ids, np.cumsum(lengths)[:-1])
    return RaggedBatch.pack(sequences, **more)


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=MAX_SEQS).filter(lambda it: sum(it) <= MAX_TOKENS)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(LENGTHS)
def test_any_batch_gives_what_it_gives_without_padding(
    served: Served, seen: set[int], lengths: list[int]
) -> None:
    batch = batch_of(lengths)
    expected = served.plain(batch).vectors
    seen.clear()
    result = served.padded(batch)
    padded = min(row_bucket(batch.num_tokens), MAX_TOKENS)
    picked = min(1 << (len(lengths) - 1).bit_length(), padded)
    assert seen and seen <= {padded, picked}
    assert result.non_finite == ()
    torch.testing.assert_close(torch.from_numpy(result.vectors), expected, rtol=1e-4, atol=1e-5)


def test_tokens_and_spans_are_those_without_padding(served: Served) -> None:
    hidden: frozenset[TokenOutput] = frozenset({"hidden"})
    spans = None
    if served.engine.info.pooling == "mean":
        spans = [np.array([[0, 2], [2, 5]], np.int32), None, np.array([[1, 9], [9, 9]], np.int32)]
    batch = batch_of([33, 1, 9], spans=spans, token_outputs=hidden)
    expected, result = served.plain(batch), served.padded(batch)
    assert result.vectors.shape == expected.vectors.shape
    assert result.tokens["hidden"].shape == (43, SIZE)
    for found, wanted in (
        (result.vectors, expected.vectors),
        (result.tokens["hidden"], expected.tokens["hidden"]),
    ):
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)


def test_soon_products_are_compiled_for_all_numbers_of_rows_up_to_the_largest(seen: set[int]) -> None:
    served = serve("bge-small")
    seen.clear()
    served.padded(batch_of([60, 40]))
    for _ in range(len(list(row_buckets(104)))):
        served.padded(batch_of([60, 43]))
    served.engine._stream.synchronize()
    assert seen == {*row_buckets(104)}
    for length in (199, 1, 17):
        served.padded(batch_of([length]))
    served.engine._stream.synchronize()
    assert seen == {*row_buckets(104), 192, 200, 1}  # 200: the most that a step takes; 1: the token picked
    served.engine.close()


@pytest.mark.parametrize("most", [64, 512, 4096, 16_384])
def test_of_numbers_of_tokens_at_random_a_few_percent_are_padding(most: int) -> None:
    """What docs/tuning.md says of a CPU's steps."""
    counts = range(1, most + 1)
    rows = sum(map(row_bucket, counts))
    assert 0.02 <= 1 - sum(counts) / rows < 0.045


def test_padding_is_counted_and_never_above_what_a_step_takes() -> None:
    served = serve("minilm")
    for lengths in ([33], [50, 50, 50, 49], [32]):
        served.padded(batch_of(lengths))
    stats = served.engine.stats()
    served.engine.close()
    assert stats["tokens"] == 33 + 199 + 32
    assert stats["padded_tokens"] == 3 + 1 + 0
