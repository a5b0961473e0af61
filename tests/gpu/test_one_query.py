"""Attention of one query a sequence on the GPU: near fp64, the same bits again, in graphs of any lengths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rose.kernels import dispatch
from rose.kernels.early import Early, launching
from rose.kernels.jit import one_query as jit
from rose.kernels.jit.one_query import OneQueryPlan
from rose.kernels.one_query import OneQuery, PickedRows, one_query_attention, one_query_scratch
from tests.gpu.loaded_model import nothing_allocated

pytestmark = pytest.mark.gpu

Heads = tuple[int, int, int]
BGE_M3, BGE_SMALL, QWEN3 = (16, 16, 64), (12, 12, 32), (16, 8, 128)
MAX_ERROR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-5}
SHAPES = {
    "1x4096": [4096],
    "100x512": [512] * 100,
    "16x1": [1] * 16,
    "300 sequences": [1 + 7 * index % 190 for index in range(300)],
    "a long one among short ones": [3] * 7 + [8000] + [5] * 8,
    "empty ones": [0, 100, 0, 700, 0, 0],
}


@dataclass(frozen=True)
class Case:
    """q, k and v packed, rows of NaN past the sequences; offsets that may be overwritten."""

    packed: Tensor
    hidden: Tensor
    cu_seqlens: Tensor
    heads: Heads
    out: PickedRows

    @classmethod
    def of(cls, num_tokens: int, num_seqs: int, heads: Heads, dtype: torch.dtype = torch.bfloat16) -> Case:
        torch.manual_seed(num_tokens)
        width = (heads[0] + 2 * heads[1]) * heads[2]
        packed, hidden = (torch.randn(num_tokens, size, device="cuda").to(dtype) for size in (width, 1024))
        context, few = (poisoned(num_seqs, size, dtype) for size in (heads[0] * heads[2], 1024))
        out = PickedRows(context, few, one_query_scratch(heads[2], "cuda"))
        return cls(packed, hidden, torch.zeros(num_seqs + 1, device="cuda").int(), heads, out)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        query, key, dim = self.heads
        q, k, v = torch.split(self.packed.view(len(self.packed), -1, dim), [query, key, key], dim=1)
        return q, k, v

    def set(self, lengths: list[int]) -> None:
        """Others; what is past them becomes NaN, and so does all that a kernel must write."""
        for rows in (self.packed, self.hidden):
            rows.normal_()
        self.cu_seqlens.fill_(sum(lengths))
        self.cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
        for rows in (self.packed[sum(lengths) :], self.hidden[sum(lengths) :]):
            rows.fill_(float("nan"))
        self.poison()

    def poison(self) -> None:
        for rows in (self.out.context, self.out.hidden, self.out.scratch):
            rows.fill_(float("nan"))

    def run(self, query: OneQuery, plan: OneQueryPlan | None = None) -> None:
        jit.one_query_attention(self.qkv, self.hidden, self.cu_seqlens, query, self.out, plan)

    def check(self, lengths: list[int], query: OneQuery) -> None:
        """Of the real sequences in fp64, and of the empty ones zeros."""
        assert dispatch.uses_triton(self.hidden)
        group, end = self.heads[0] // self.heads[1], 0
        context = self.out.context.view(-1, self.heads[0], self.heads[2])
        for index, length in enumerate(lengths):
            start, end = end, end + length
            if not length:
                continue
            row = end - 1 if query.which == "last" else start
            q, k, v = (x[start:end].double() for x in self.qkv)
            keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
            weights = (torch.einsum("hd,nhd->hn", q[row - start], keys) * query.scale).softmax(-1)
            expected = torch.einsum("hn,nhd->hd", weights, values)
            error = (context[index].double() - expected).norm() / expected.norm()
            assert error < MAX_ERROR[self.packed.dtype], (index, length)
            assert torch.equal(self.out.hidden[index], self.hidden[row])
        empty = self.cu_seqlens.diff() == 0
        assert not self.out.context[empty].any() and not self.out.hidden[empty].any()


def poisoned(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count, width), float("nan"), dtype=dtype, device="cuda")


def loaded(lengths: list[int], heads: Heads, dtype: torch.dtype = torch.bfloat16) -> Case:
    case = Case.of(sum(lengths) + 9, len(lengths) + 3, heads, dtype)
    case.set(lengths)
    return case


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("heads", [BGE_M3, BGE_SMALL, QWEN3, (4, 2, 96)], ids=str)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_near_fp64(lengths, heads, which):
    query, case = OneQuery(which, heads[2] ** -0.5, causal=which == "last"), loaded(lengths, heads)
    case.run(query)
    case.check(lengths, query)


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 8, 16])
def test_any_split_and_dtype(splits, dtype):
    query, case = OneQuery("first", 0.125), loaded([700, 33], BGE_M3, dtype)
    room = case.out.scratch.new_full((splits * len(case.out.context) * 16, 68), float("nan"))
    out = PickedRows(case.out.context, case.out.hidden, room)
    plan = OneQueryPlan(splits, 64)
    jit.one_query_attention(case.qkv, case.hidden, case.cu_seqlens, query, out, plan)
    case.check([700, 33], query)


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_the_same_bits_again(lengths):
    query, case = OneQuery("first", 0.125), loaded(lengths, BGE_M3)
    case.run(query)
    first = case.out.context.clone()
    for early in (*Early, *Early):
        case.poison()
        with launching(early):
            case.run(query)
        assert torch.equal(case.out.context, first)


def test_plain_version_on_the_device(monkeypatch):
    """What serves where Triton is not installed neither waits nor reads offsets on the host."""
    query, lengths = OneQuery("last", 0.088, causal=True), [300, 0, 41]
    case = loaded(lengths, QWEN3)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "uses_triton", lambda x: False)
        one_query_attention(case.qkv, case.hidden, case.cu_seqlens, query, case.out)
        case.poison()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_query_attention(case.qkv, case.hidden, case.cu_seqlens, query, case.out)
    graph.replay()
    case.check(lengths, query)


@pytest.mark.parametrize("num_tokens", [64, 512, 8192])
def test_replays_with_other_lengths(num_tokens):
    query, case = OneQuery("first", 0.125), Case.of(num_tokens, 16, BGE_M3)
    case.set([num_tokens])
    case.run(query)
    with nothing_allocated():
        case.run(query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(query)
    most = num_tokens - 15
    for lengths in ([num_tokens], [1] * 16, [0, most, 0, 3], [num_tokens // 16] * 16, [1] * 15 + [most], []):
        case.set(lengths)
        graph.replay()
        case.check(lengths, query)


@pytest.mark.parametrize("splits", [1, 8])
def test_nan_stays_in_its_sequence(splits):
    lengths, query = [100, 300, 50], OneQuery("first", 0.125)
    case = loaded(lengths, BGE_M3)
    for part in case.qkv:
        part[250] = float("nan")
    case.run(query, OneQueryPlan(splits, 64))
    context = case.out.context
    assert context[1].isnan().all() and context[[0, 2]].isfinite().all()
