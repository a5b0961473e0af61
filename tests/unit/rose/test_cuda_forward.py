"""What the forwards of a shape are told, on a CPU with a model that only listens."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_utils.errors import CudaError
from cuda_utils.pinned import PinnedPool, PlainHostAllocator
from rose.attention.base import AttentionSpec
from rose.batch import EngineInfo, RaggedBatch, TokenOutput
from rose.buckets import token_bucket
from rose.cuda_forward import CudaForward, graph_bytes, most_token_values
from rose.device_batch import DeviceBatch, Outputs
from rose.graph_runner import CaptureError
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


@pytest.mark.parametrize(
    ("code", "raised"), [(2, CaptureError), (700, CudaError)], ids=["out of memory", "illegal address"]
)
def test_a_graph_that_cannot_be_uploaded_was_not_captured(
    monkeypatch: pytest.MonkeyPatch, code: int, raised: type[Exception]
) -> None:
    class Executable:
        def __init__(self, pointer: int) -> None:
            assert pointer == 7

        def upload(self, stream: object) -> None:
            raise CudaError(code, "cuGraphUpload")

    class Captured(Graph):
        def raw_cuda_graph_exec(self) -> int:
            return 7

    forward, _ = forward_of(monkeypatch, ("sdpa",))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr("rose.cuda_forward.GraphExec", Executable)
    slot = StagingSlot(0, LAYOUT, PinnedPool(PlainHostAllocator(), 1 << 20))
    slot.fill(RaggedBatch.pack([np.ones(3, np.int32)]), 16, 1)
    with pytest.raises(raised, match="cuGraphUpload"):
        forward.capture(forward.key_of(16, 1, 3), slot)


@given(
    widths=st.dictionaries(
        st.sampled_from(["hidden", "lexical", "multi_vector"]), st.sampled_from([1, 7, 384, 1024]), max_size=3
    ),
    max_batch_tokens=st.integers(1, 200_000),
    max_token_bytes=st.integers(0, 1 << 28),
)
def test_what_tokens_give_fits_in_any_step_that_is_allowed(
    widths: dict[TokenOutput, int], max_batch_tokens: int, max_token_bytes: int
) -> None:
    info: EngineInfo = replace(
        INFO, token_outputs=widths, max_batch_tokens=max_batch_tokens, max_token_bytes=max_token_bytes
    )
    room = most_token_values(info)
    for count in range(1, len(widths) + 1):
        for kinds in combinations(widths, count):
            width = sum(widths[kind] for kind in kinds)
            for num_tokens in {1, info.most_tokens(kinds) // 2, info.most_tokens(kinds)} - {0}:
                assert token_bucket(num_tokens) * width <= room


def test_of_a_small_model_s_tokens_the_largest_step_has_room() -> None:
    info = replace(INFO, token_outputs={"hidden": 384}, max_batch_tokens=131_072, max_token_bytes=64 << 20)
    assert info.most_tokens(["hidden"]) == 43_690
    assert most_token_values(info) == 44_032 * 384
