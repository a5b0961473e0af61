"""The encoder layer writes to given tensors, as on a GPU, what it would make itself on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rose.attention.sdpa import SdpaAttention
from rose.device_batch import DeviceBatch, Outputs
from rose.layers.encoder import EncoderBuffers, EncoderLayer
from rose.models.bert import BertModel
from tests.unit.rose.bert_cases import BERT, CPU, make_case, random_sequences, run

MAX_TOKENS = 48


@pytest.fixture
def models() -> tuple[BertModel, BertModel]:
    """One that makes its activations, and one that has them made for MAX_TOKENS rows."""
    weights = make_case(BERT).weights
    plain, buffered = (BertModel(BERT, weights, torch.float32, CPU, MAX_TOKENS) for _ in range(2))
    buffers = EncoderBuffers.allocate(BERT, MAX_TOKENS, torch.float32, CPU)
    assert buffers.wide is not None and buffers.wide.shape == (MAX_TOKENS, BERT.intermediate_size)
    buffered._on_cpu, buffered._buffers = False, buffers
    return plain, buffered


def _padded_batch(model: BertModel, lengths: list[int], filler: int) -> DeviceBatch:
    """MAX_TOKENS tokens of `filler` past the sequences, and two empty sequences at the end."""
    offsets = np.concatenate([[0], np.cumsum([*lengths, 0, 0])]).astype(np.int32)
    ids = torch.full((MAX_TOKENS,), filler, dtype=torch.int32)
    ids[: offsets[-1]] = torch.from_numpy(np.concatenate(random_sequences(BERT, lengths)))
    attention = SdpaAttention(model.attention_spec)
    return DeviceBatch(ids, torch.from_numpy(offsets), None, offsets, max(lengths), attention)


def test_given_tensors_change_no_vector(models: tuple[BertModel, BertModel]) -> None:
    plain, buffered = models
    lengths = [9, 1, 20]
    expected = run(plain, random_sequences(BERT, lengths)).vectors
    for filler in (0, 77):
        outputs = Outputs(torch.full((5, BERT.hidden_size), float("nan")))
        with torch.inference_mode():
            buffered.forward(_padded_batch(buffered, lengths, filler), outputs)
        torch.testing.assert_close(outputs.vectors[:3], expected, rtol=1e-4, atol=1e-5)
        assert not outputs.vectors[3:].any()


@pytest.mark.parametrize("empty", [0, 1, 5])
def test_picked_rows_give_the_first_token(empty: int) -> None:
    """Through given tensors, also where padding makes more sequences than there are rows to pick into."""
    config = replace(BERT, pooling="cls")
    model = BertModel(config, make_case(BERT).weights, torch.float32, CPU, MAX_TOKENS)
    sequences = random_sequences(BERT, [1, 2, 1])
    expected = run(model, sequences).vectors
    model._on_cpu, model._buffers = False, EncoderBuffers.allocate(config, 4, torch.float32, CPU)
    offsets = np.pad(np.array([0, 1, 3, 4], np.int32), (0, empty), mode="edge")
    ids, attention = torch.from_numpy(np.concatenate(sequences)), SdpaAttention(model.attention_spec)
    outputs = Outputs(torch.full((3 + empty, BERT.hidden_size), float("nan")))
    batch = DeviceBatch(ids, torch.from_numpy(offsets), None, offsets, 2, attention)
    with torch.inference_mode():
        model.forward(batch, outputs)
    torch.testing.assert_close(outputs.vectors[:3], expected, rtol=1e-4, atol=1e-5)
    assert not outputs.vectors[3:].any()


def test_only_a_last_layer_of_which_rows_are_picked_absorbs(models: tuple[BertModel, BertModel]) -> None:
    picking = BertModel(replace(BERT, pooling="cls"), make_case(BERT).weights, torch.float32, CPU, MAX_TOKENS)
    *earlier, last = (layer for layer in picking._layers if isinstance(layer, EncoderLayer))
    assert last.absorbed is not None
    assert not any(layer.absorbed for layer in earlier)
    assert not any(layer.absorbed for layer in models[0]._layers if isinstance(layer, EncoderLayer))


@pytest.mark.parametrize("buffered", [True, False])
def test_absorbed_keys_and_values_change_no_vector(buffered: bool) -> None:
    """Nor is there a product for them."""
    config = replace(BERT, pooling="cls")
    model = BertModel(config, make_case(BERT).weights, torch.float32, CPU, 4 * MAX_TOKENS)
    last = model._layers[-1]
    assert isinstance(last, EncoderLayer)
    if buffered:
        model._on_cpu = False
        model._buffers = EncoderBuffers.allocate(config, 4 * MAX_TOKENS, torch.float32, CPU)
    sequences = random_sequences(BERT, [40, 40, 70, 33])
    absorbed = run(model, sequences).vectors
    model._layers[-1] = replace(last, qkv=None)  # type: ignore[arg-type]
    assert torch.equal(run(model, sequences).vectors, absorbed)
    model._layers[-1] = replace(last, absorbed=None)
    torch.testing.assert_close(run(model, sequences).vectors, absorbed, rtol=1e-4, atol=1e-5)


def test_buffers_are_those_that_were_made(models: tuple[BertModel, BertModel]) -> None:
    """A captured graph replays on fixed addresses: rows() must give views, never copies."""
    buffers = models[1]._buffers
    rows = buffers.rows(7)
    assert rows.partials is buffers.partials
    for name in ("hidden", "attended", "context", "dense", "qkv", "wide"):
        whole, part = getattr(buffers, name), getattr(rows, name)
        assert part.shape[0] == 7 and part.data_ptr() == whole.data_ptr()
    assert EncoderBuffers().rows(7) == EncoderBuffers()


def test_picked_rows_lie_apart_from_all_rows(models: tuple[BertModel, BertModel]) -> None:
    """On a GPU programs run in any order: where one writes, another may not still have to read."""
    rows = models[1]._buffers.rows(40)
    for num_rows in (1, 40):
        few = rows.picked(num_rows)
        names = {"context": "context", "hidden": "attended", "attended": "hidden"}
        for name, memory in names.items():
            assert getattr(few, name).data_ptr() == getattr(rows, memory).data_ptr()
            assert len(getattr(few, name)) == num_rows


def test_more_tokens_than_the_buffers_hold_are_refused(models: tuple[BertModel, BertModel]) -> None:
    batch = _padded_batch(models[1], [4], 0)
    longer = replace(batch, input_ids=torch.zeros(MAX_TOKENS + 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="batch has 49 tokens; the buffers hold 48"):
        models[1].forward(longer, Outputs(torch.empty(3, BERT.hidden_size)))
