"""What the forwards of a shape are told, on a CPU with a model that only listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cuda_utils.pinned import PinnedPool, PlainHostAllocator
from rose.attention.base import AttentionSpec
from rose.batch import RaggedBatch
from rose.cuda_forward import CudaForward, graph_bytes
from rose.device_batch import DeviceBatch, Outputs
from rose.staging import StagingLayout, StagingSlot
from tests.unit.rose.simulated_device import INFO

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 4, 8, 8**-0.5, False, torch.float32, CPU)
LAYOUT = StagingLayout(256, 8, has_types=False)


class Listener:
    """A model that remembers the longest sequences it was told of."""

    attention_spec = SPEC

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.config = SimpleNamespace(windows=windows)
        self.told: list[int] = []

    def forward(self, batch: DeviceBatch, outputs: Outputs) -> None:
        self.told.append(batch.max_seqlen)


class Graph:
    """One that records nothing."""

    def capture_begin(self, **options: object) -> None:
        pass

    def capture_end(self) -> None:
        pass


def forward_of(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], windows: tuple[int | None, ...] = ()
) -> tuple[Any, Listener]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    model: Any = Listener(windows)
    backends: Any = dict.fromkeys(names)
    stream: Any = None
    return CudaForward(model, backends, INFO, LAYOUT, stream), model


@pytest.mark.parametrize(
    ("names", "windows", "longest"),
    [
        (("sdpa",), (), 32),
        (("sdpa", "fa4"), (None, 64), 32),
        (("sdpa", "fa4"), (), INFO.max_model_len),
    ],
    ids=["torch's grows with it", "so do layers with a window", "FlashAttention-4 does not"],
)
def test_a_graph_is_told_of_the_same_longest_sequence_as_an_eager_run(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], windows: tuple[int | None, ...], longest: int
) -> None:
    forward, model = forward_of(monkeypatch, names, windows)
    batch = RaggedBatch.pack([np.ones(length, np.int32) for length in (20, 30, 70)])
    slot = StagingSlot(0, LAYOUT, PinnedPool(PlainHostAllocator(), 1 << 20))
    slot.fill(batch, 192, 4)
    key = forward.key_of(192, 4, 30)
    forward.run(key, slot)
    forward._record(Graph(), key, slot)
    assert model.told == [longest, longest]


def test_lengths_are_one_shape_up_to_a_power_of_two_and_at_most_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, _ = forward_of(monkeypatch, ("sdpa",))
    keys = [forward.key_of(192, 4, longest) for longest in (17, 32, 33, 64, 100, 128)]
    assert [key.longest for key in keys] == [32, 32, 64, 64, 128, 128]
    assert forward.key_of(32, 4, 32).longest == forward.key_of(32, 4, 17).longest == 32
    assert forward.key_of(16, 1, 16).longest == 16


def test_only_backends_that_plan_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = forward_of(monkeypatch, ("sdpa",))
    planned: list[list[int]] = []

    def plan(offsets: np.ndarray) -> None:
        planned.append(offsets.tolist())

    slot = StagingSlot(3, LAYOUT, PinnedPool(PlainHostAllocator(), 1 << 20))
    slot.fill(RaggedBatch.pack([np.ones(length, np.int32) for length in (2, 1)]), 16, 4)
    for plans in (True, False):
        forward._backends["sdpa"] = SimpleNamespace(plans=plans, plan=plan)
        forward.plan(forward.key_of(16, 4, 2), slot)
    assert planned == [[0, 2, 3, 3, 3]]


@pytest.mark.parametrize(
    ("device_bytes", "torch_bytes", "expected"),
    [
        (2 << 20, 0, 2 << 20),
        (0, 0, 0),
        (42 << 20, 40 << 20, 42 << 20),
        (3 << 30, 0, 8 << 20),  # another process loads its model
        (3 << 30, 40 << 20, 48 << 20),
        (-(3 << 30), 0, 0),  # or ends
        (-(3 << 30), 40 << 20, 40 << 20),
        (2 << 20, -(64 << 20), 2 << 20),  # torch gives back what it held for something else
    ],
)
def test_what_others_do_on_the_device_is_not_a_graph_s(
    device_bytes: int, torch_bytes: int, expected: int
) -> None:
    assert graph_bytes(device_bytes, torch_bytes) == expected
