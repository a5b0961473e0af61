"""BERT and XLM-R at full size on the GPU: near the fp32 reference, and fit to be captured in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose.attention.backends import load_backends
from rose.attention.base import begin
from rose.config import load_config
from rose.device_batch import DeviceBatch
from rose.kernels.early import Early
from rose.models import bert
from rose.models.bert import BertModel
from rose.reference import reference_vectors
from rose.weights import DummyWeights
from tests.gpu.loaded_model import CopyAttention, LoadedModel, least_cosine, nothing_allocated

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 4608


@dataclass(frozen=True)
class Loaded(LoadedModel):
    """The same with what the reference says."""

    def least_cosine(self, vectors: torch.Tensor, sequences: list[np.ndarray]) -> float:
        return least_cosine(vectors, reference_vectors(self.config, self.weights, sequences, device="cuda"))


def load(alias: str, dtype: torch.dtype, backend: str | None = None, num_layers: int | None = None) -> Loaded:
    config = load_config(ROOT / "rose" / "presets" / alias)
    config = replace(config, num_layers=num_layers or config.num_layers)
    weights = DummyWeights(1, "cuda")
    model = BertModel(config, weights, dtype, torch.device("cuda"), MAX_TOKENS)
    backends = load_backends(model.attention_spec, compile_missing=False)
    return Loaded(model, weights, backends[backend or next(iter(backends))])


@pytest.fixture(scope="module", params=["minilm", "bge-small", "bge-m3"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    yield load(request.param, torch.bfloat16)
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("lengths", "padded_to"), [([1], 16), ([9, 30, 2], 64), ([100, 150], 256), ([512] * 4 + [3], 4352)]
)
def test_near_the_fp32_reference(loaded: Loaded, lengths: list[int], padded_to: int) -> None:
    sequences = loaded.sequences(lengths)
    assert loaded.least_cosine(loaded.run(sequences, padded_to).vectors, sequences) >= 0.999


@pytest.mark.parametrize("backend", ["sdpa", None])
def test_fp32_equals_the_reference(backend: str | None) -> None:
    loaded = load("bge-m3", torch.float32, backend, num_layers=4)
    sequences = loaded.sequences([5, 100, 100, 64])
    assert loaded.least_cosine(loaded.run(sequences, 320).vectors, sequences) >= 0.99999


def test_torch_alone_is_near_the_reference(loaded: Loaded) -> None:
    """The fallback for GPUs without another backend."""
    sdpa = load_backends(loaded.model.attention_spec, compile_missing=False)["sdpa"]
    sequences = loaded.sequences([40, 7, 200])
    vectors = replace(loaded, attention=sdpa).run(sequences, 256).vectors
    assert loaded.least_cosine(vectors, sequences) >= 0.999


def test_padding_changes_no_bit(loaded: Loaded) -> None:
    sequences = loaded.sequences([29, 3])
    assert torch.equal(loaded.run(sequences, 64).vectors, loaded.run(sequences, 64, filler=777).vectors)


@pytest.mark.parametrize("padded_to", [16, 128, 512, 768, 1024, 1536])
@pytest.mark.parametrize("early", [Early.AT_ONCE, Early.AFTER_WAIT])
def test_early_launches_change_no_bit(
    loaded: Loaded, padded_to: int, early: Early, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = min(padded_to - 10, loaded.config.max_model_len)  # beyond it there are no positions to read
    sequences = loaded.sequences([*[longest] * ((padded_to - 10) // longest), 3])
    monkeypatch.setattr(bert, "early_for", lambda *batch: Early.NO)
    expected = loaded.run(sequences, padded_to).vectors
    monkeypatch.setattr(bert, "early_for", lambda *batch: early)
    for _ in range(5):
        assert torch.equal(loaded.run(sequences, padded_to).vectors, expected)


def test_more_sequences_than_rows(loaded: Loaded) -> None:
    """Single tokens, padded to twice as many sequences as rows: nothing can be picked."""
    sequences = loaded.sequences([1] * 16)
    offsets = np.concatenate([np.arange(17), np.full(16, 16)]).astype(np.int32)
    loaded.attention.plan(offsets)
    ids = torch.from_numpy(np.concatenate(sequences)).cuda()
    batch = DeviceBatch(ids, torch.from_numpy(offsets).cuda(), None, offsets, 16, loaded.attention)
    begin(loaded.attention, batch.cu_seqlens, 16)
    outputs = loaded.outputs(32)
    with torch.inference_mode():
        loaded.model.forward(batch, outputs)
    assert loaded.least_cosine(outputs.vectors[:16], sequences) >= 0.999
    assert not outputs.vectors[16:].any()


def test_replays_with_other_tokens_and_offsets(loaded: Loaded) -> None:
    batches = [(320, 0, 0), (3, 5, 7), (100, 100, 120), (1, 1, 1)]
    for sequences, vectors in loaded.replayed(320, batches):
        assert loaded.least_cosine(vectors, sequences) >= 0.999


@pytest.mark.parametrize("padded_to", [16, 512])
def test_forward_neither_allocates_nor_waits(loaded: Loaded, padded_to: int) -> None:
    stub = replace(loaded, attention=CopyAttention())
    batch, outputs = stub.batch(stub.sequences([padded_to - 2]), padded_to), stub.outputs(2)
    with torch.inference_mode():
        stub.model.forward(batch, outputs)  # compiles kernels, makes cuBLAS's workspace
        with nothing_allocated():
            stub.model.forward(batch, outputs)
