"""The calls into FlashAttention-4 and FlashInfer, against scripted kernels that record them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rose.attention.base import AttentionSpec
from rose.attention.fa4 import Fa4Attention
from rose.attention.flashinfer import WORKSPACE_BYTES, FlashInferAttention

SPEC = AttentionSpec(16, 8, 128, 0.25, False, torch.bfloat16, torch.device("cpu"))
CAUSAL = AttentionSpec(4, 4, 64, 0.125, True, torch.bfloat16, torch.device("cpu"))


class ScriptedModule:
    """Stands for a FlashInfer module: `plan` fills the page-locked buffer, as the real one does."""

    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def plan(self, *arguments: Any) -> object:
        pinned, offsets = arguments[2], arguments[3]
        pinned.view(torch.int32)[: len(offsets)] = offsets
        self.planned.append(arguments)
        return SimpleNamespace(number=len(self.planned))

    def ragged_run(self, *arguments: Any) -> None:
        self.ran.append(arguments)


def packed(spec: AttentionSpec, tokens: int = 8) -> tuple[torch.Tensor, ...]:
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    qkv = torch.zeros(tokens, sum(heads), spec.head_dim, dtype=spec.dtype)
    out = torch.empty(tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype)
    return (*torch.split(qkv, heads, dim=1), out, torch.tensor([0, 3, 3, 7], dtype=torch.int32))


def cu(*offsets: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(offsets, np.int32)


def test_fa4_is_called_with_18_arguments_in_place() -> None:
    calls: list[tuple[Any, ...]] = []
    backend = Fa4Attention(SPEC, lambda *arguments: calls.append(arguments))
    q, k, v, out, cu_seqlens = packed(SPEC)
    backend.plan(cu(0, 3, 3, 7), 8, 0)
    backend.forward(q, k, v, out, cu_seqlens, 4)
    (call,) = calls
    assert len(call) == 18
    assert [id(x) for x in call[:4]] == [id(x) for x in (q, k, v, out)]
    assert call[5] == 0.25
    assert call[6] is cu_seqlens
    assert call[7] is cu_seqlens
    assert call[15] == (None, None)
    assert all(call[place] is None for place in (4, *range(8, 15), 16, 17))
    assert backend.name == "fa4"
    assert backend.capturable


@pytest.mark.parametrize(("version", "tail"), [("fa2", (-1, True, 0, 0)), ("fa3", ())])
def test_flashinfer_plans_with_the_batch_and_the_spec(version: str, tail: tuple[object, ...]) -> None:
    module = ScriptedModule()
    FlashInferAttention(SPEC, version, module).plan(cu(0, 3, 3, 7), 64, 0)
    (call,) = module.planned
    float_workspace, int_workspace, pinned, offsets, key_offsets, lengths = call[:6]
    assert float_workspace.dtype == int_workspace.dtype == pinned.dtype == torch.uint8
    assert len(int_workspace) == len(pinned) == WORKSPACE_BYTES
    assert offsets.tolist() == key_offsets.tolist() == [0, 3, 3, 7]
    assert offsets.dtype == lengths.dtype == torch.int32
    assert lengths.tolist() == [3, 0, 4]
    # rows, sequences, heads of q and kv, page size, graph mode, head dims, causal, window
    assert call[6:16] == (64, 3, 16, 8, 1, True, 128, 128, False, -1)
    assert call[16:] == tail


def test_each_slot_has_a_page_locked_buffer_of_its_own_and_keeps_it() -> None:
    module = ScriptedModule()
    backend = FlashInferAttention(SPEC, "fa3", module, slots=3)
    for slot, offsets in ((0, cu(0, 5)), (1, cu(0, 9)), (0, cu(0, 6)), (2, cu(0, 1))):
        backend.plan(offsets, 64, slot)
    buffers = [call[2].data_ptr() for call in module.planned]
    assert buffers[0] == buffers[2]
    assert len(set(buffers)) == 3
    # slot 1's copy may still be queued: planning slots 0 and 2 has not touched it
    assert module.planned[1][2].view(torch.int32)[:2].tolist() == [0, 9]
    assert len({call[1].data_ptr() for call in module.planned}) == 1  # the device's buffer is shared


@pytest.mark.parametrize(
    ("version", "tail"),
    [
        ("fa2", (None,) * 8 + (0.0, 0.125, 1.0, 1e-4, 0)),
        ("fa3", (None,) * 4 + (0.0, 0.125, 1.0, 0)),
    ],
)
def test_flashinfer_runs_the_plan_made_last(version: str, tail: tuple[object, ...]) -> None:
    module = ScriptedModule()
    backend = FlashInferAttention(CAUSAL, version, module, slots=2)
    q, k, v, out, cu_seqlens = packed(CAUSAL)
    backend.plan(cu(0, 8), 8, 0)
    backend.plan(cu(0, 3, 3, 7), 8, 1)
    backend.forward(q, k, v, out, cu_seqlens, 4)
    (call,) = module.ran
    assert call[0] is module.planned[1][0]
    assert call[1] is module.planned[1][1]
    assert call[2].number == 2
    assert [id(x) for x in call[3:9]] == [id(x) for x in (q, k, v, cu_seqlens, cu_seqlens, out)]
    # lse, causal mask, NHD layout, no window, no programmatic launch
    assert call[9:14] == (None, 1, 0, -1, False)
    assert call[14:] == tail
    assert backend.name == f"flashinfer-{version}"
    assert backend.capturable


def test_the_mask_is_off_for_a_bidirectional_model() -> None:
    module = ScriptedModule()
    backend = FlashInferAttention(SPEC, "fa2", module)
    backend.plan(cu(0, 8), 8, 0)
    backend.forward(*packed(SPEC), 8)
    assert module.ran[0][10] == 0
