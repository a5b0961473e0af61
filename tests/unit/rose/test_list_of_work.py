"""Attention's list of work: made once a forward, for every model, but where one launch does all layers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cuda_utils.pinned import PinnedPool, PlainHostAllocator
from rose.attention.sdpa import SdpaAttention
from rose.batch import RaggedBatch
from rose.cuda_forward import CudaForward
from rose.device_batch import DeviceBatch, Outputs
from rose.models import registry
from rose.models.bert import BertModel
from rose.models.one_launch import OneLaunch
from rose.models.qwen3 import Qwen3Model
from rose.models.staged import StagedModel
from rose.staging import StagingSlot
from tests.unit.rose.simulated_device import INFO
from tests.unit.rose.test_cuda_forward import LAYOUT, SPEC

MOST = 16  # rows of a launch of all layers


class Plain:
    """A model that asks for attention; told: what the backend heard, in order."""

    attention_spec = SPEC
    config = SimpleNamespace(windows=())

    def __init__(self, told: list[object]) -> None:
        self.told = told

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        self.told.append("forward")


class InOneLaunch(Plain):
    def in_one_launch(self, num_tokens: int) -> bool:
        return num_tokens <= MOST


class Listed(SdpaAttention):
    def __init__(self, told: list[object]) -> None:
        super().__init__(SPEC)
        self.told = told

    def write_list(self, cu_seqlens: torch.Tensor, num_tokens: int) -> None:
        self.told.append((cu_seqlens.tolist(), num_tokens))


def staged(told: list[object], kind: type[Plain]) -> StagedModel:
    stages: Any = lambda pooled, outputs: None  # noqa: E731
    stages.pooled = lambda outputs: outputs
    inner: Any = kind(told)
    return StagedModel(inner, stages)


def told_by(model: Any, told: list[object], num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Of a forward of two sequences, padded to so many tokens."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    stream: Any = None
    forward = CudaForward(model, {"sdpa": Listed(told)}, INFO, LAYOUT, stream)
    slot = StagingSlot(0, LAYOUT, PinnedPool(PlainHostAllocator(), 1 << 20))
    slot.fill(RaggedBatch.pack([np.ones(length, np.int32) for length in (3, 9)]), num_tokens, 2)
    forward._input[: LAYOUT.capacity].copy_(torch.from_numpy(slot._image))
    forward.run(forward.key_of(num_tokens, 2, 9), slot)
    return told


@pytest.mark.parametrize("num_tokens", [MOST, 32])
@pytest.mark.parametrize("kind", [Plain, InOneLaunch])
@pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind stages"])
def test_it_is_made_before_a_forward_that_reads_it(
    kind: type[Plain], num_tokens: int, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    model = staged(told, kind) if behind else kind(told)
    made = [] if kind is InOneLaunch and num_tokens == MOST else [([0, 3, 12], num_tokens)]
    assert told_by(model, told, num_tokens, monkeypatch) == [*made, "forward"]


def test_a_model_says_what_its_launch_takes() -> None:
    for kind in (BertModel, Qwen3Model):
        model: Any = object.__new__(kind)
        model._stack = None
        assert isinstance(model, OneLaunch) and not model.in_one_launch(1)
        model._stack = SimpleNamespace(takes=lambda num_tokens: num_tokens <= MOST)
        assert [model.in_one_launch(num_tokens) for num_tokens in (MOST, MOST + 1)] == [True, False]


def test_other_models_have_none() -> None:
    kinds = {getattr(importlib.import_module(module), name) for module, name in registry._MODELS.values()}
    assert {kind for kind in kinds if hasattr(kind, "in_one_launch")} == {BertModel, Qwen3Model}
