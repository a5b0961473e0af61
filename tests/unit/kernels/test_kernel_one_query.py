"""Attention of one query a sequence, by Triton and in plain torch, against softmax in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rose.kernels import one_query
from rose.kernels.jit import one_query as jit
from rose.kernels.jit.one_query import OneQueryPlan, plan_for
from rose.kernels.one_query import OneQuery, PickedRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PADDING = 5
HIDDEN = 40
Heads = tuple[int, int, int]
LENGTHS = {
    "1": [1],
    "one tile and a bit": [33],
    "empty ones": [0, 0, 7, 25, 0, 0],
    "equal ones around an empty one": [6, 6, 0, 6, 4],
}


class Case:
    """Packed q, k and v around 1, rows of NaN behind the sequences, and what comes of them."""

    def __init__(self, lengths: list[int], heads: Heads = (4, 2, 16), dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(sum(lengths))
        num_tokens, (q_heads, k_heads, dim) = sum(lengths) + PADDING, heads
        packed = torch.randn(num_tokens, (q_heads + 2 * k_heads) * dim, generator=generator)
        hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
        for rows in (packed, hidden):
            rows[sum(lengths) :] = float("nan")
        self.lengths, self.heads, self.dim = lengths, [q_heads, k_heads, k_heads], dim
        self.packed, self.hidden = packed.to(DEVICE, dtype), hidden.to(DEVICE, dtype)
        self.cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.split(self.packed.view(len(self.packed), -1, self.dim), self.heads, dim=1)
        return q, k, v

    def room(self, scratch_rows: int = 256) -> PickedRows:
        def poisoned(*shape: int, dtype: torch.dtype = self.packed.dtype) -> Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)

        count, scratch = len(self.lengths), poisoned(scratch_rows, self.dim + 4, dtype=torch.float32)
        return PickedRows(poisoned(count, self.heads[0] * self.dim), poisoned(count, HIDDEN), scratch)

    def by_triton(self, query: OneQuery, plan: OneQueryPlan | None = None) -> PickedRows:
        out = self.room()
        jit.one_query_attention(self.qkv, self.hidden, self.cu_seqlens, query, out, plan)
        return out

    def plain(self, query: OneQuery) -> PickedRows:
        out = self.room()
        one_query.one_query_attention(self.qkv, self.hidden, self.cu_seqlens, query, out)
        return out

    def expected(self, query: OneQuery) -> tuple[Tensor, Tensor]:
        """f64[S, Hq D] and the rows of hidden."""
        group, ends = self.heads[0] // self.heads[1], self.cu_seqlens.tolist()[1:]
        context = torch.zeros(len(self.lengths), self.heads[0], self.dim, dtype=torch.float64)
        hidden = torch.zeros(len(self.lengths), HIDDEN, dtype=self.hidden.dtype)
        for index, (end, length) in enumerate(zip(ends, self.lengths, strict=True)):
            if not length:
                continue
            row = end - 1 if query.which == "last" else end - length
            seen = slice(end - length, row + 1 if query.causal else end)
            q, k, v = (x.double().cpu() for x in self.qkv)
            keys, values = (x[seen].repeat_interleave(group, dim=1) for x in (k, v))
            weights = (torch.einsum("hd,nhd->hn", q[row], keys) * query.scale).softmax(-1)
            context[index] = torch.einsum("hn,nhd->hd", weights, values)
            hidden[index] = self.hidden[row].cpu()
        return context.flatten(1), hidden

    def check(self, out: PickedRows, query: OneQuery) -> None:
        context, hidden = self.expected(query)
        tolerance = DTYPES[self.packed.dtype]
        torch.testing.assert_close(out.context.double().cpu(), context, rtol=tolerance, atol=tolerance)
        assert torch.equal(out.hidden.cpu(), hidden)


FIRST, LAST = OneQuery("first", 0.25), OneQuery("last", 0.25, causal=True)
QUERIES = {"first": FIRST, "last": LAST, "first, causal": OneQuery("first", 0.25, causal=True)}
PLANS = {"whole": OneQueryPlan(1, 16), "split": OneQueryPlan(4, 8), "chosen": None}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_any_lengths(plan, lengths, query):
    case = Case(lengths)
    case.check(case.by_triton(query, plan), query)


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_plain_versions(lengths, query, monkeypatch):
    """Also the one for a GPU without Triton, which must read no offsets on the host."""
    case = Case(lengths)
    monkeypatch.setattr(one_query.dispatch, "uses_triton", lambda x: False)
    case.check(case.plain(query), query)
    monkeypatch.setattr(one_query, "_by_runs", one_query._by_segments)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    out = case.plain(query)
    monkeypatch.undo()
    case.check(out, query)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [(2, 2, 32), (2, 1, 64), (4, 1, 16), (3, 3, 12), (2, 1, 96), (1, 1, 128)], ids=str
)
def test_any_heads(heads, dtype, monkeypatch):
    case = Case([20, 0, 9], heads, dtype)
    for plan in (None, OneQueryPlan(2, 16)):
        case.check(case.by_triton(LAST, plan), LAST)
    monkeypatch.setattr(one_query.dispatch, "uses_triton", lambda x: False)
    case.check(case.plain(LAST), LAST)


@settings(max_examples=10, deadline=None)  # Triton's interpreter takes 0.1 s a launch
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.sampled_from([1, 2, 8]))
def test_same_bits_alone_beside_others_and_again(lengths, splits):
    case, plan = Case(lengths), OneQueryPlan(splits, 8)
    together = case.by_triton(FIRST, plan)
    case.check(together, FIRST)
    assert torch.equal(case.by_triton(FIRST, plan).context, together.context)
    for index, (start, length) in enumerate(zip(case.cu_seqlens.tolist(), lengths, strict=False)):
        alone = Case([length])
        alone.packed, alone.hidden = case.packed[start:], case.hidden[start:]
        assert torch.equal(alone.by_triton(FIRST, plan).context[0], together.context[index])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("splits", [1, 4])
def test_nan_stays_in_its_sequence_and_shows(splits, part):
    case, plan = Case([9, 12, 5]), OneQueryPlan(splits, 8)
    row = 9 if part == "q" else 15
    dict(zip("qkv", case.qkv, strict=True))[part][row] = float("nan")
    before = Case([9, 12, 5]).by_triton(FIRST, plan)
    out = case.by_triton(FIRST, plan)
    assert out.context[1].isnan().all()
    for index in (0, 2):
        assert torch.equal(out.context[index], before.context[index])


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_nan_in_plain_torch(part, monkeypatch):
    """A query of NaN gives zeros where torch's own attention on a CPU does; its hidden row shows it then."""
    monkeypatch.setattr(one_query.dispatch, "uses_triton", lambda x: False)
    case = Case([9, 12, 5])
    dict(zip("qkv", case.qkv, strict=True))[part][9] = float("nan")
    for way in (one_query._by_runs, one_query._by_segments):
        monkeypatch.setattr(one_query, "_by_runs", way)
        context = case.plain(FIRST).context
        assert context[[0, 2]].isfinite().all()
        assert context[1].isnan().all() or part == "q"


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_one_key_has_all_the_weight(scale):
    """Scores so far apart that every other weight is zero: nothing overflows."""
    case, query = Case([70]), OneQuery("first", scale)
    for plan in PLANS.values():
        out = case.by_triton(query, plan)
        torch.testing.assert_close(out.context.double().cpu(), case.expected(query)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_seqs", [1, 3, 64, 512, 2048])
def test_splits_fit_the_scratch(num_seqs):
    for num_tokens in (1, 256, 257, 4096, 51200):
        plan = plan_for(num_tokens, num_seqs * 16, 64, one_query.SCRATCH_ROWS)
        assert plan.splits == 1 or plan.splits * num_seqs * 16 <= one_query.SCRATCH_ROWS
        assert plan.splits & (plan.splits - 1) == 0 and plan.splits <= jit._MAX_SPLITS
        # What is compiled ahead for one sequence is all that is launched for more.
        assert plan.splits == 1 or plan_for(num_tokens, 16, 64, one_query.SCRATCH_ROWS).splits > 1
    assert plan_for(4096, 16, 64, 0).splits == 1


def test_scratch_is_for_devices():
    assert one_query.one_query_scratch(64, "cpu").shape == (0, 68)
    assert one_query.one_query_scratch(64, "meta").shape == (one_query.SCRATCH_ROWS, 68)


def test_more_splits_than_are_added_up_are_refused():
    case, query = Case([40]), OneQuery("first", 0.25)
    with pytest.raises(ValueError, match="32 splits; at most 16"):
        case.by_triton(query, OneQueryPlan(32, 8))
