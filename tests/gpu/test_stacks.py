"""All layers in one launch, at full size in bf16, against fp32 and against a launch a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rose.attention.backends import load_backends
from rose.config import load_config
from rose.kernels.cuda.cubin import DECODER_STACK, DECODER_WIDE, ENCODER_STACK, ENCODER_WIDE
from rose.kernels.cuda.stack import stack_library
from rose.layers.decoder_stack import DecoderStack
from rose.layers.encoder_stack import EncoderStack
from rose.models.bert import BertModel
from rose.models.qwen3 import Qwen3Model
from rose.models.registry import build_model
from rose.reference import reference_vectors
from rose.weights import DummyWeights
from tests.gpu.loaded_model import LoadedModel, least_cosine

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
# Lengths and rows: of each kernel's tile, of one more, of queries in groups of 16, of sequences across them.
BATCHES = [
    ([1], 1),
    ([1], 16),
    ([9], 16),
    ([16], 16),
    ([17], 17),
    ([30], 32),
    ([32], 32),
    ([33], 33),
    ([33], 48),
    ([64], 64),
    ([1, 30, 2], 64),
    ([65], 65),
    ([65], 80),
    ([100], 112),
    ([2], 128),
    ([127], 127),
    ([127], 128),
    ([128], 128),
    ([16] * 8, 128),
    ([5, 3, 40, 60, 1, 7], 128),
    ([1] * 100, 112),
    ([1] * 128, 128),
    # Tiles of 64 and of 128 tokens, one to four; queries in groups of 64, keys in tiles of as many tokens.
    ([129], 129),
    ([129], 192),
    ([1, 128], 192),
    ([1], 192),
    ([180, 11], 192),
    ([255], 256),
    ([256], 256),
    ([64] * 4, 256),
    ([63, 65, 1, 100], 256),
    ([1] * 200, 256),
    ([257], 257),
    ([257], 320),
    ([2], 320),
    ([300, 20], 320),
    ([5, 3, 200, 60, 1, 7], 300),
    ([384], 384),
    ([129, 256], 448),
    ([511], 511),
    ([512], 512),
    ([16] * 32, 512),
    ([63, 65, 127, 1, 256], 512),
    ([1] * 512, 512),
]


@pytest.fixture(scope="module", params=["pplx-embed", "qwen3-embedding", "bge-m3"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    source = ENCODER_STACK if request.param == "bge-m3" else DECODER_STACK
    if not torch.cuda.is_available() or stack_library(source) is None:
        pytest.skip("no Hopper GPU with room, or python -m rose.kernels.cuda.build has not been run")
    config = load_config(ROOT / "rose" / "presets" / request.param)
    weights = DummyWeights(3, "cuda")
    model = build_model(config, weights, torch.bfloat16, torch.device("cuda"), 512)
    backends = load_backends(model.attention_spec, compile_missing=False)
    loaded = LoadedModel(model, weights, next(iter(backends.values())))
    stack = _stacked(loaded)._stack
    assert stack is not None
    assert stack.takes(512), "decoder_wide.cu or encoder_wide.cu is not built"
    yield loaded
    torch.cuda.empty_cache()


def _stacked(loaded: LoadedModel) -> Qwen3Model | BertModel:
    assert isinstance(loaded.model, Qwen3Model | BertModel)
    return loaded.model


def _words(loaded: LoadedModel) -> torch.Tensor:
    model = _stacked(loaded)
    return model._table if isinstance(model, Qwen3Model) else model._tables.word


def _unstacked(loaded: LoadedModel, sequences: list[np.ndarray], rows: int) -> torch.Tensor:
    model = _stacked(loaded)
    stack, model._stack = model._stack, None
    try:
        return loaded.forward(sequences, rows).vectors
    finally:
        model._stack = stack


@pytest.mark.parametrize(("lengths", "rows"), BATCHES)
def test_as_near_fp32_as_a_launch_a_kernel(loaded: LoadedModel, lengths: list[int], rows: int) -> None:
    sequences = loaded.sequences(lengths)
    expected = reference_vectors(loaded.config, loaded.weights, sequences, device="cuda")
    cosine = least_cosine(loaded.forward(sequences, rows).vectors[:-1], expected)
    assert cosine >= 0.9998
    assert cosine >= least_cosine(_unstacked(loaded, sequences, rows)[:-1], expected) - 1e-4


@pytest.mark.parametrize(("lengths", "rows"), BATCHES)
def test_every_run_gives_the_same_bits(loaded: LoadedModel, lengths: list[int], rows: int) -> None:
    """Blocks run at other paces each time; what one reads too early or too late would show."""
    sequences = loaded.sequences(lengths)
    expected = loaded.forward(sequences, rows).vectors
    other = loaded.sequences([rows // 2, rows // 3], seed=1)
    for turn in range(50):
        if turn % 5 == 0:
            loaded.forward(other, rows)  # what it leaves behind must not be taken for what is to come
        assert torch.equal(loaded.forward(sequences, rows).vectors, expected), turn


def test_all_that_is_waited_for_is_nothing_afterwards(loaded: LoadedModel) -> None:
    stack = _stacked(loaded)._stack
    assert stack is not None
    looked_at = [
        (name, one.kernels.memory[name])
        for one in stack._kernels
        for name in ("qkv", "partials", "squares")
        if name in one.kernels.memory
    ]
    for lengths, rows in BATCHES:
        loaded.forward(loaded.sequences(lengths), rows)
        for name, memory in looked_at:
            assert (memory == -1).all(), (name, lengths)


def test_the_kernel_for_many_rows_takes_few(loaded: LoadedModel) -> None:
    model = _stacked(loaded)
    wide = {source: stack_library(source) for source in (DECODER_WIDE, ENCODER_WIDE)}
    kind = DecoderStack if isinstance(model, Qwen3Model) else EncoderStack
    alone = kind.of(model._layers, model.attention_spec, wide.get)
    few = [(loaded.sequences(lengths), rows) for lengths, rows in BATCHES if rows <= 128]
    expected = [loaded.forward(sequences, rows).vectors[:-1] for sequences, rows in few]
    with patch.object(model, "_stack", alone):
        for (sequences, rows), vectors in zip(few, expected, strict=True):
            assert least_cosine(loaded.forward(sequences, rows).vectors[:-1], vectors) >= 0.9999


@pytest.mark.parametrize(("lengths", "rows"), [([20, 21], 128), ([20, 121], 192), ([200, 121], 448)])
def test_padding_changes_no_bit(loaded: LoadedModel, lengths: list[int], rows: int) -> None:
    sequences = loaded.sequences(lengths)
    first, second = (loaded.forward(sequences, rows, filler).vectors for filler in (0, 7777))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("lengths", "rows"), [([40, 7, 60], 128), ([40, 7, 160], 256), ([140, 77, 260], 512)]
)
def test_a_sequence_is_the_same_beside_others(loaded: LoadedModel, lengths: list[int], rows: int) -> None:
    sequences = loaded.sequences(lengths)
    packed = loaded.forward(sequences, rows).vectors
    for row, sequence in enumerate(sequences):
        alone = loaded.forward([sequence], len(sequence)).vectors
        assert least_cosine(packed[row : row + 1], alone[:1]) >= 0.9999


@pytest.mark.parametrize(
    "lengths",
    [[33], [5, 9, 12], [1] * 40, [60, 3, 60], [33, 120, 40], [64, 64, 64, 64], [100, 200, 77], [1] * 300],
)
def test_a_number_that_is_none_stays_in_its_sequence(loaded: LoadedModel, lengths: list[int]) -> None:
    """Nor does anything wait for it to go away."""
    words, sequences, bad = _words(loaded), loaded.sequences(lengths), len(lengths) // 2
    rows = -(-sum(lengths) // 16) * 16
    expected = loaded.forward(sequences, rows).vectors
    token = sequences[bad][-1]
    kept = words[token].clone()
    words[token] = float("nan")
    try:
        vectors = loaded.forward(sequences, rows).vectors
    finally:
        words[token] = kept
    assert vectors[bad].isnan().all()
    others = [row for row in range(len(lengths)) if row != bad]
    assert torch.equal(vectors[others], expected[others])
    assert torch.equal(loaded.forward(sequences, rows).vectors, expected)


def test_replays_with_other_tokens_and_offsets(loaded: LoadedModel) -> None:
    some = [(1, 0, 60), (3, 5, 7), (40, 40, 48)]
    replays = list(loaded.replayed(128, [(128, 0, 0), *some]))
    for rows in (256, 512):
        replays += loaded.replayed(rows, [(rows, 0, 0), *some, (1, rows - 70, 69), (rows - 2, 1, 1)])
    for sequences, vectors in replays:
        expected = reference_vectors(loaded.config, loaded.weights, sequences, device="cuda")
        assert least_cosine(vectors, expected) >= 0.9998
