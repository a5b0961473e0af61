"""Absorbed attention, by Triton and in plain torch, against keys, values and softmax in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rose.kernels import absorbed
from rose.kernels.absorbed import AbsorbedHeads, absorbs, scratch_elements
from rose.kernels.jit import absorbed as jit
from rose.kernels.jit.absorbed import AbsorbedPlan, plan_for
from rose.kernels.one_query import OneQuery, PickedRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The interpreter multiplies no bf16; fp16 takes the same path through the kernels.
INTERPRETED = {torch.float32, torch.float16}
PADDING = 5
FIRST, LAST = OneQuery("first", 0.25), OneQuery("last", 0.25, causal=True)
QUERIES = {"first": FIRST, "last": LAST}
LENGTHS = {
    "1": [1],
    "one tile and a bit": [65],
    "several tiles": [150, 64, 3],
    "empty ones": [0, 0, 7, 70, 0, 0],
    "equal ones around an empty one": [6, 6, 0, 6, 4],
    "more than a program takes": [2] * 17,
}
FEW = AbsorbedPlan(tokens=64, rows=16, cols=16, offsets=2, stages=2)
MANY = AbsorbedPlan(tokens=128, rows=64, cols=32, offsets=64, tile_warps=8)
PLANS = {"few offsets at once": FEW, "larger tiles": MANY, "chosen": None}


class Case:
    """Hidden states around 1, rows of NaN behind the sequences, and what comes of them."""

    def __init__(self, lengths: list[int], size: int = 96, num_heads: int = 3, dtype=torch.float32):
        generator = torch.Generator().manual_seed(sum(lengths))

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(DEVICE, dtype)

        self.lengths, self.hidden = lengths, normal(sum(lengths) + PADDING, size)
        self.hidden[sum(lengths) :] = float("nan")
        weights, self.key_bias = normal(3 * size, size, std=size**-0.5), normal(size)
        self.heads = AbsorbedHeads(*weights.chunk(3), normal(size), normal(size), num_heads)
        self.cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()

    def room(self) -> PickedRows:
        wanted = scratch_elements(len(self.hidden), len(self.lengths), self.heads)
        shapes = (
            (len(self.lengths), self.hidden.shape[1]),
            (len(self.lengths), self.hidden.shape[1]),
            (wanted,),
        )
        return PickedRows(*(self.hidden.new_full(shape, float("nan")) for shape in shapes))

    def by_triton(self, query: OneQuery = FIRST, plan: AbsorbedPlan | None = None) -> PickedRows:
        out = self.room()
        jit.absorbed_attention(self.hidden, self.cu_seqlens, self.heads, query, out, plan)
        return out

    def plain(self, query: OneQuery = FIRST) -> PickedRows:
        out = self.room()
        absorbed.absorbed_attention(self.hidden, self.cu_seqlens, self.heads, query, out)
        return out

    def expected(self, query: OneQuery) -> tuple[Tensor, Tensor]:
        """f64[S, H], by keys and values of all rows, and the rows of hidden."""
        heads = self.heads
        context = torch.zeros(len(self.lengths), self.hidden.shape[1], dtype=torch.float64)
        picked = torch.zeros_like(context, dtype=self.hidden.dtype)
        places = (
            (heads.query, heads.query_bias),
            (heads.key, self.key_bias),
            (heads.value, heads.value_bias),
        )
        for index, (start, length) in enumerate(zip(self.cu_seqlens.tolist(), self.lengths, strict=False)):
            if not length:
                continue
            row = length - 1 if query.which == "last" else 0
            x = self.hidden[start : start + length].double().cpu()
            q, k, v = (
                (x @ weight.double().cpu().T + bias.double().cpu()).view(length, heads.num_heads, -1)
                for weight, bias in places
            )
            weights = (torch.einsum("hd,nhd->hn", q[row], k) * query.scale).softmax(-1)
            context[index] = torch.einsum("hn,nhd->hd", weights, v).flatten()
            picked[index] = self.hidden[start + row].cpu()
        return context, picked

    def check(self, out: PickedRows, query: OneQuery = FIRST) -> None:
        context, picked = self.expected(query)
        tolerance = DTYPES[self.hidden.dtype]
        torch.testing.assert_close(out.context.double().cpu(), context, rtol=tolerance, atol=tolerance)
        assert torch.equal(out.hidden.cpu(), picked)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed.dispatch, "uses_triton", lambda x: False)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_any_lengths(plan, lengths):
    case = Case(lengths)
    case.check(case.by_triton(FIRST, plan))


def test_the_last_query():
    case = Case(LENGTHS["empty ones"])
    case.check(case.by_triton(LAST), LAST)


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_plain_version(lengths, query, in_torch):
    case = Case(lengths)
    case.check(case.plain(query), query)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_heads"), [(32, 1), (64, 4), (96, 6), (64, 2), (128, 2), (320, 20)])
def test_any_heads(size, num_heads, dtype, monkeypatch):
    case = Case([70, 0, 9], size, num_heads, dtype)
    if DEVICE == "cuda" or dtype in INTERPRETED:
        case.check(case.by_triton())
    monkeypatch.setattr(absorbed.dispatch, "uses_triton", lambda x: False)
    case.check(case.plain())


@settings(max_examples=10, deadline=None)  # Triton's interpreter takes 0.1 s a launch
@given(st.lists(st.integers(0, 140), min_size=1, max_size=4), st.sampled_from([FEW, MANY]))
def test_near_the_same_alone_beside_others_and_again(lengths, plan):
    case = Case(lengths)
    together = case.by_triton(FIRST, plan)
    case.check(together)
    assert torch.equal(case.by_triton(FIRST, plan).context, together.context)
    for index, (start, length) in enumerate(zip(case.cu_seqlens.tolist(), lengths, strict=False)):
        alone = Case([length])
        alone.hidden, alone.heads = case.hidden[start:], case.heads
        context = alone.by_triton(FIRST, plan).context[0]
        torch.testing.assert_close(context, together.context[index], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
@pytest.mark.parametrize("row", [9, 60, 130])
def test_nan_stays_in_its_sequence_and_shows(row, monkeypatch):
    lengths = [9, 130, 5]
    case = Case(lengths)
    case.hidden[row] = float("nan")
    before = Case(lengths)
    for which in ("by_triton", "plain"):
        context = getattr(case, which)().context
        assert context[1].isnan().all()
        assert torch.equal(context[[0, 2]], getattr(before, which)().context[[0, 2]])
        monkeypatch.setattr(absorbed.dispatch, "uses_triton", lambda x: False)


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_one_row_has_all_the_weight(scale):
    """Scores so far apart that every other weight is zero: nothing overflows."""
    case, query = Case([140]), OneQuery("first", scale)
    context = case.by_triton(query).context
    torch.testing.assert_close(context.double().cpu(), case.expected(query)[0], rtol=1e-3, atol=1e-3)


def test_scores_that_grow_from_tiles_to_tiles(monkeypatch):
    """What was added up before is worth less with each addition, but not nothing."""
    monkeypatch.setattr(jit, "_TILES", 2)
    case = Case([450, 3])
    heads, x = case.heads, case.hidden
    q = (heads.query @ x[0] + heads.query_bias).view(heads.num_heads, -1)
    ways = torch.einsum("hd,hdi->hi", q, heads.key.view(*q.shape, -1)) * FIRST.scale
    way = torch.linalg.pinv(ways) @ torch.ones(heads.num_heads, device=DEVICE)  # of 1 in each head's score
    x[1:450] += torch.linspace(0, 8, 449, device=DEVICE)[:, None] * way
    case.check(case.by_triton(FIRST, FEW))


def test_refusals():
    case = Case([40])
    with pytest.raises(ValueError, match="whole sequence"):
        case.plain(OneQuery("first", 0.25, causal=True))
    out = replace(case.room(), scratch=torch.zeros(100, device=DEVICE))
    with pytest.raises(ValueError, match="100 elements of scratch; 582 are needed"):
        jit.absorbed_attention(case.hidden, case.cu_seqlens, case.heads, FIRST, out)


def test_when_it_is_worth_it(monkeypatch):
    heads, few = Case([1], 128, 2).heads, Case([1], 96, 2).heads  # of 64, and of 48
    least, less, more = (Case([1], 128, count).heads for count in (8, 16, 1))  # of 16, 8 and 128
    hidden = torch.zeros(4096, 1)
    monkeypatch.setattr(absorbed.dispatch, "uses_triton", lambda x: False)
    assert absorbs(hidden, 128, heads, None) and absorbs(hidden[:32], 1, few, None)
    assert not absorbs(hidden, 129, heads, None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert not absorbs(hidden, 1, heads, None)
    monkeypatch.setattr(absorbed.dispatch, "uses_triton", lambda x: True)
    room = torch.zeros(scratch_elements(4096, 128, heads))
    assert absorbs(hidden, 128, heads, room) and absorbs(hidden[:1536], 48, heads, room)
    assert not absorbs(hidden, 128, few, room) and not absorbs(hidden[:1535], 1, heads, room)
    large = torch.zeros(scratch_elements(4096, 128, less))
    assert absorbs(hidden, 128, least, large)
    assert not absorbs(hidden, 128, less, large) and not absorbs(hidden, 128, more, large)
    assert not absorbs(hidden, 128, heads, room[1:]) and not absorbs(hidden, 1, heads, None)


@pytest.mark.parametrize(("size", "num_heads"), [(1024, 16), (768, 12), (384, 12)])
def test_widened_rows_are_scratch_enough(size, num_heads):
    """In a layer that widens fourfold, of as many sequences as there may be."""
    weight = torch.zeros(size, size, dtype=torch.bfloat16)
    heads = AbsorbedHeads(weight, weight, weight, weight[0], weight[0], num_heads)
    for num_tokens in (1024, 2560, 131_072):
        assert scratch_elements(num_tokens, num_tokens // 32, heads) <= num_tokens * 4 * size


def test_no_smaller_tiles_than_there_is_scratch_for():
    for num_tokens in (1, 8191, 8192, 131_072):
        hidden = torch.empty(num_tokens, 1, dtype=torch.bfloat16)
        assert plan_for(hidden, 64).tokens >= absorbed.MIN_TILE
