"""Absorbed attention on the GPU: near fp64, the same bits again, in graphs of any lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rose.kernels import dispatch
from rose.kernels.absorbed import AbsorbedHeads, absorbed_attention, scratch_elements
from rose.kernels.early import Early, launching
from rose.kernels.jit import absorbed as jit
from rose.kernels.one_query import OneQuery, PickedRows
from tests.gpu.replays import replays_of

pytestmark = pytest.mark.gpu

BGE_M3, BGE_BASE, BGE_SMALL = (1024, 16), (768, 12), (384, 12)
MAX_ERROR = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 1e-5}
QUERY = OneQuery("first", 0.125)
SHAPES = {
    "5x512": [512] * 5,
    "1x8192": [8192],
    "100x512": [512] * 100,
    "300 sequences": [1 + 7 * index % 190 for index in range(300)],
    "a long one among short ones": [3] * 7 + [8000] + [5] * 8,
    "empty ones": [0, 100, 0, 1700, 0, 0],
    "tiles filled to the last row": [64, 128, 192, 256, 1, 63, 65, 511],
}


@dataclass(frozen=True)
class Case:
    """Hidden states, rows of NaN past the sequences; offsets that may be overwritten."""

    hidden: Tensor
    cu_seqlens: Tensor
    heads: AbsorbedHeads
    key_bias: Tensor
    out: PickedRows

    @classmethod
    def of(
        cls, num_tokens: int, num_seqs: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
    ) -> Case:
        torch.manual_seed(num_tokens)
        size, num_heads = shape

        def normal(*shape: int, std: float) -> Tensor:
            return (torch.randn(*shape, device="cuda") * std).to(dtype)

        parts = normal(3 * size, size, std=size**-0.5).chunk(3)
        biases = normal(3, size, std=0.3)
        heads = AbsorbedHeads(*parts, biases[0], biases[2], num_heads)
        hidden = normal(num_tokens, size, std=1.0)
        room = (num_seqs, size), (num_seqs, size), (scratch_elements(num_tokens, num_seqs, heads),)
        out = PickedRows(*(hidden.new_empty(each) for each in room))
        cu_seqlens = torch.zeros(num_seqs + 1, dtype=torch.int32, device="cuda")
        return cls(hidden, cu_seqlens, heads, biases[1], out)

    def set(self, lengths: list[int]) -> None:
        """Others; what is past them becomes NaN, and so does all that a kernel must write."""
        self.hidden.normal_()
        self.cu_seqlens.fill_(sum(lengths))
        self.cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
        self.hidden[sum(lengths) :].fill_(float("nan"))
        self.poison()

    def poison(self) -> None:
        for rows in (self.out.context, self.out.hidden, self.out.scratch):
            rows.fill_(float("nan"))

    def run(self) -> None:
        absorbed_attention(self.hidden, self.cu_seqlens, self.heads, QUERY, self.out)

    def check(self, lengths: list[int]) -> None:
        """Of the real sequences in fp64, by keys and values of all rows, and of the empty ones zeros."""
        assert dispatch.uses_triton(self.hidden)
        heads, end = self.heads, 0
        query, key, value = (part.double() for part in (heads.query, heads.key, heads.value))
        for index, length in enumerate(lengths):
            start, end = end, end + length
            if not length:
                continue
            x = self.hidden[start:end].double()
            q = (x[0] @ query.T + heads.query_bias.double()).view(heads.num_heads, -1)
            k = (x @ key.T + self.key_bias.double()).view(length, heads.num_heads, -1)
            v = (x @ value.T + heads.value_bias.double()).view(length, heads.num_heads, -1)
            weights = (torch.einsum("hd,nhd->hn", q, k) * QUERY.scale).softmax(-1)
            expected = torch.einsum("hn,nhd->hd", weights, v).flatten()
            error = (self.out.context[index].double() - expected).norm() / expected.norm()
            assert error < MAX_ERROR[self.hidden.dtype], (index, length)
            assert torch.equal(self.out.hidden[index], self.hidden[start])
        empty = self.cu_seqlens.diff() == 0
        assert not self.out.context[empty].any() and not self.out.hidden[empty].any()


def loaded(lengths: list[int], shape: tuple[int, int] = BGE_M3, dtype: torch.dtype = torch.bfloat16) -> Case:
    case = Case.of(sum(lengths) + 9, len(lengths) + 3, shape, dtype)
    case.set(lengths)
    return case


@pytest.mark.parametrize("shape", [BGE_M3, BGE_BASE, BGE_SMALL], ids=str)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_near_fp64(lengths, shape):
    case = loaded(lengths, shape)
    case.run()
    case.check(lengths)


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("lengths", [[700, 33], [9000]], ids=str)
def test_any_dtype(lengths, dtype):
    case = loaded(lengths, BGE_M3, dtype)
    case.run()
    case.check(lengths)


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_the_same_bits_again(lengths):
    case = loaded(lengths)
    case.run()
    first = case.out.context.clone()
    for early in (*Early, *Early):
        case.poison()
        with launching(early):
            case.run()
        assert torch.equal(case.out.context, first)


@pytest.mark.parametrize("num_tokens", [1024, 2560, 16_384])
def test_replays_with_other_lengths(num_tokens):
    case = Case.of(num_tokens, 16, BGE_M3)
    for lengths in replays_of(case, num_tokens):
        case.check(lengths)


@pytest.mark.parametrize("num_tokens", [1, 8192])
def test_nan_stays_in_its_sequence(num_tokens):
    """In smaller tiles and in larger ones."""
    lengths = [100, 300, 50, num_tokens]
    case = loaded(lengths)
    case.hidden[250] = float("nan")
    case.run()
    context = case.out.context
    assert context[1].isnan().all() and context[[0, 2, 3]].isfinite().all()


def test_scratch_that_is_too_small_is_refused():
    case = loaded([100])
    with pytest.raises(ValueError, match="elements of scratch"):
        jit.absorbed_attention(
            case.hidden, case.cu_seqlens, case.heads, QUERY, replace(case.out, scratch=case.out.scratch[1:])
        )
