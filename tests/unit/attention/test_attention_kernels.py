"""The calls into FlashAttention-4 and FlashInfer, against scripted kernels that record them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rose.attention.base import AttentionSpec, Fp8Attention, begin, input_dtype
from rose.attention.chained import ChainedAttention, pairs, takes
from rose.attention.fa4 import Fa4Attention
from rose.attention.flashinfer import FlashInferAttention, FlashInferFp8Attention
from rose.attention.work_list import Fa2List, Fa3List

SPEC = AttentionSpec(16, 8, 128, 0.25, False, torch.bfloat16, torch.device("cpu"))
CAUSAL = AttentionSpec(4, 4, 64, 0.125, True, torch.bfloat16, torch.device("cpu"))


class ScriptedModule:
    """Stands for a FlashInfer module."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def ragged_run(self, *arguments: Any) -> None:
        self.ran.append(arguments)


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of the kernels that write lists: (plan, offsets, workspace) of each."""
    calls: list[tuple[Any, ...]] = []
    for plan in (Fa2List, Fa3List):
        monkeypatch.setattr(plan, "write", lambda self, *arguments: calls.append((self, *arguments)))
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    return calls


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
    backend.plan(cu(0, 3, 3, 7))
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


def test_a_list_is_of_the_batch_and_the_spec(written: list[tuple[Any, ...]]) -> None:
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    for version in ("fa2", "fa3"):
        begin(FlashInferAttention(CAUSAL, version, ScriptedModule()), offsets, 300)
    (packed_list, *first), (dealt_list, *second) = written
    assert packed_list == Fa2List(tile_rows=128, tiles=5, group=1, num_tokens=300, num_seqs=3)
    assert dealt_list == Fa3List(tile_rows=192, tiles=4, heads=4, blocks=132, causal=True)
    for cu_seqlens, workspace in (first, second):
        assert cu_seqlens is offsets
        assert (workspace.dtype, len(workspace)) == (torch.uint8, 12 << 20)


def test_a_batch_whose_list_may_not_fit_is_refused() -> None:
    backend = FlashInferAttention(SPEC, "fa3", ScriptedModule())
    with pytest.raises(
        RuntimeError, match=r"the list of 70313 tiles takes 22500692 bytes, more than 12582912"
    ):
        backend.write_list(torch.zeros(2, dtype=torch.int32), 9_000_000)


@pytest.mark.parametrize(
    ("version", "tail"),
    [
        ("fa2", (None,) * 8 + (0.0, 0.125, 1.0, 1e-4, 0)),
        ("fa3", (None,) * 4 + (0.0, 0.125, 1.0, 0)),
    ],
)
def test_flashinfer_runs_the_list_made_last(
    version: str, tail: tuple[object, ...], written: list[tuple[Any, ...]]
) -> None:
    module = ScriptedModule()
    backend = FlashInferAttention(CAUSAL, version, module)
    q, k, v, out, cu_seqlens = packed(CAUSAL)
    backend.write_list(cu_seqlens[:2], 8)
    backend.write_list(cu_seqlens, 8)
    backend.forward(q, k, v, out, cu_seqlens, 4)
    (call,) = module.ran
    assert call[1] is written[1][2]
    assert call[2] == written[1][0].info != written[0][0].info
    assert [id(x) for x in call[3:9]] == [id(x) for x in (q, k, v, cu_seqlens, cu_seqlens, out)]
    # lse, causal mask, NHD layout, no window, no programmatic launch
    assert call[9:14] == (None, 1, 0, -1, False)
    assert call[14:] == tail
    assert backend.name == f"flashinfer-{version}"
    assert backend.capturable
    assert not backend.plans


@pytest.mark.parametrize("spec", [SPEC, CAUSAL])
def test_heads_in_fp8_come_with_their_scales(spec: AttentionSpec, written: list[tuple[Any, ...]]) -> None:
    module = ScriptedModule()
    backend = FlashInferFp8Attention(spec, module)
    *_, out, cu_seqlens = packed(spec)
    all_heads = spec.num_heads + 2 * spec.num_kv_heads
    heads = torch.zeros(8, all_heads, spec.head_dim).to(torch.float8_e4m3fn)
    begin(backend, cu_seqlens, 8)
    scales = torch.arange(all_heads).float()
    backend.forward_fp8(heads, scales, out, cu_seqlens)
    (call,) = module.ran
    assert isinstance(written[0][0], Fa3List)
    starts = [0, spec.num_heads, spec.num_heads + spec.num_kv_heads]
    for x, start, count in zip(call[3:6], starts, (16, 8, 8) if spec is SPEC else (4, 4, 4), strict=True):
        assert x.dtype is torch.float8_e4m3fn
        assert x.shape == (8, count, spec.head_dim)
        assert x.storage_offset() == start * spec.head_dim
        assert x.stride() == (all_heads * spec.head_dim, spec.head_dim, 1)
    assert [id(x) for x in call[6:9]] == [id(cu_seqlens), id(cu_seqlens), id(out)]
    assert call[9:14] == (None, int(spec.causal), 0, -1, False)
    # factors of q, k and v by head; scale; factors for all heads, which those by head replace
    assert torch.cat(call[14:17]).tolist() == scales.tolist()
    assert [len(factors) for factors in call[14:17]] == [x.shape[1] for x in call[3:6]]
    assert call[17:] == (spec.scale, 1.0, 1.0, 1.0)
    assert backend.name == "flashinfer-fa3-fp8"


def test_numbers_in_fp8_may_stand_for_themselves() -> None:
    module = ScriptedModule()
    backend = FlashInferFp8Attention(SPEC, module)
    assert isinstance(backend, Fp8Attention)
    assert input_dtype(backend, SPEC) is torch.float8_e4m3fn
    assert input_dtype(FlashInferAttention(SPEC, "fa3", module), SPEC) is torch.bfloat16
    q, k, v, out, cu_seqlens = packed(SPEC)
    backend.write_list(cu_seqlens, 8)
    backend.forward(q, k, v, out, cu_seqlens, 8)
    assert module.ran[0][14:] == (None, None, None, 0.25, 1.0, 1.0, 1.0)


def test_the_mask_is_off_for_a_bidirectional_model() -> None:
    module = ScriptedModule()
    backend = FlashInferAttention(SPEC, "fa2", module)
    q, k, v, out, cu_seqlens = packed(SPEC)
    backend.write_list(cu_seqlens, 8)
    backend.forward(q, k, v, out, cu_seqlens, 8)
    assert module.ran[0][10] == 0


class ScriptedKernels:
    """Stands for chained_attention.cu's."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def launch(self, *arguments: Any) -> None:
        self.ran.append(arguments)


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        # Two heads with the same keys go to a pair of blocks.
        (SPEC, Fa3List(tile_rows=128, tiles=5, heads=8, blocks=66, causal=False, halves=True)),
        (CAUSAL, Fa3List(tile_rows=128, tiles=5, heads=4, blocks=132, causal=True)),
    ],
)
def test_chained_runs_the_list_made_last(
    spec: AttentionSpec, made: Fa3List, written: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    kernels: Any = ScriptedKernels()
    backend = ChainedAttention(spec, kernels)
    q, k, v, out, cu_seqlens = packed(spec)
    begin(backend, cu_seqlens[:2], 8)
    begin(backend, cu_seqlens, 300)
    backend.forward(q, k, v, out, cu_seqlens, 4)
    (_, (listed, offsets, memory)) = written
    assert listed == made
    assert offsets is cu_seqlens
    ((qkv, to, works, scale, stream),) = kernels.ran
    assert [id(x) for x in (*qkv, to, works.memory)] == [id(x) for x in (q, k, v, out, memory)]
    assert (works.capacity, works.blocks, stream) == (made.capacity, 132, 77)
    assert scale == pytest.approx(spec.scale / 0.6931472)
    assert (backend.name, backend.capturable, backend.plans) == ("chained", True, False)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "paired"), [(16, 8, True), (12, 4, False), (32, 8, True), (4, 4, False)]
)
def test_heads_go_in_pairs_where_an_even_number_has_the_same_keys(
    heads: int, kv_heads: int, paired: bool
) -> None:
    assert pairs(replace(SPEC, num_heads=heads, num_kv_heads=kv_heads)) is paired


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"head_dim": 64}, True),
        ({"head_dim": 32}, False),
        ({"causal": True}, True),
        ({"scale": -0.25}, False),
        ({"window": 9}, False),
        ({"dtype": torch.float16}, False),
    ],
)
def test_chained_takes_what_it_is_compiled_for(changed: dict[str, Any], taken: bool) -> None:
    assert takes(replace(SPEC, **changed)) is taken
