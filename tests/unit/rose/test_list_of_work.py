"""Attention's list of work: made once a batch, before its layers, and not where one launch does them all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rose.attention.sdpa import SdpaAttention
from rose.batch import RaggedBatch
from rose.device_batch import DeviceBatch, Outputs
from rose.layers.encoder import EncoderBuffers
from rose.models.bert import BertModel
from rose.models.qwen3 import Qwen3Model
from rose.weights import DummyWeights
from tests.unit.rose.bert_cases import BERT

CPU = torch.device("cpu")
QWEN3 = replace(
    BERT, architecture="qwen3", num_kv_heads=BERT.num_heads, norm_eps=1e-6, rope_theta=1e4, type_vocab_size=0
)


class ListedAttention(SdpaAttention):
    """Writes down what it is told, in order."""

    def __init__(self, model: Qwen3Model | BertModel) -> None:
        super().__init__(model.attention_spec)
        self.told: list[object] = []

    def write_list(self, cu_seqlens: torch.Tensor, num_tokens: int) -> None:
        self.told.append((cu_seqlens.tolist(), num_tokens))

    def forward(self, *arguments: object) -> None:
        self.told.append("layer")
        super().forward(*arguments)  # type: ignore[arg-type]


class Stack:
    """All layers in one launch of up to 8 rows: here they do nothing."""

    def takes(self, num_tokens: int) -> bool:
        return num_tokens <= 8

    def __call__(self, batch: DeviceBatch, *given: object) -> torch.Tensor:
        return torch.zeros(batch.num_tokens, BERT.hidden_size)


@pytest.fixture(params=["qwen3", "bert"])
def model(request: pytest.FixtureRequest) -> Qwen3Model | BertModel:
    if request.param == "qwen3":
        return Qwen3Model(QWEN3, DummyWeights(0), torch.float32, CPU, 64)
    bert = BertModel(BERT, DummyWeights(0), torch.float32, CPU, 64)
    bert._on_cpu = False  # as on a GPU: all of a batch at once, in buffers made before
    bert._buffers = EncoderBuffers.allocate(BERT, 64, torch.float32, CPU)
    return bert


def _told(model: Qwen3Model | BertModel, lengths: list[int]) -> list[object]:
    batch = RaggedBatch.pack([np.arange(2, 2 + length, dtype=np.int32) for length in lengths])
    attention, offsets = ListedAttention(model), batch.cu_seqlens
    tensors = torch.from_numpy(batch.input_ids), torch.from_numpy(offsets)
    device_batch = DeviceBatch(*tensors, None, offsets, max(lengths), attention)
    with torch.inference_mode():
        model.forward(device_batch, Outputs(torch.zeros(len(lengths), BERT.hidden_size)))
    return attention.told


def test_it_is_made_before_the_layers(model: Qwen3Model | BertModel) -> None:
    told = _told(model, [3, 9])
    assert told[0] == ([0, 3, 12], 12)
    assert told.count("layer") == len(told) - 1 > 0


def test_one_launch_has_none(model: Qwen3Model | BertModel) -> None:
    model._stack = Stack()  # type: ignore[assignment]
    assert _told(model, [3, 5]) == []
    assert _told(model, [3, 6])[0] == ([0, 3, 9], 9)
