"""The first layer's QKV by lookup on the GPU: near fp32, the same bits again, in graphs of any lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rose.kernels import dispatch
from rose.kernels.early import Early, launching
from rose.kernels.embedding import BertTables
from rose.kernels.norm import LayerNorm
from rose.kernels.rope import QkRope, rope_table
from rose.kernels.token_qkv import (
    BertQkvTables,
    QkvRows,
    RotaryQkvTable,
    embed_bert_qkv,
    embed_rotary_qkv,
)
from tests.gpu.replays import replays_of

pytestmark = pytest.mark.gpu

# Widths of pplx-embed-0.6b and BGE-M3.
HIDDEN, HEADS, HEAD_DIM = 1024, (16, 8), 128
VOCAB, OFFSET = 1000, 2
SHAPES = {
    "1": [1],
    "5x512": [512] * 5,
    "1x8192": [8192],
    "100x512": [512] * 100,
    "300 sequences": [1 + 7 * index % 190 for index in range(300)],
    "empty ones": [0, 100, 0, 1700, 0, 0],
}


class Lookup(ABC):
    """A batch whose lengths may be changed. Tables have NaN in every row that none of its tokens may read.

    written: all that the kernel must write, of padded rows, too.
    """

    written: tuple[Tensor, ...]

    def __init__(self, num_tokens: int, num_seqs: int) -> None:
        torch.manual_seed(num_tokens)
        self.ids = torch.zeros(num_tokens, dtype=torch.int32, device="cuda")
        self.cu_seqlens = torch.zeros(num_seqs + 1, dtype=torch.int32, device="cuda")

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    def plain(self) -> tuple[Tensor, ...]:
        """As `written`, of the same numbers in fp32."""

    def set(self, lengths: list[int]) -> None:
        """Others, of other ids: even ones, and here and there one that counts as 0."""
        self.ids.random_(0, VOCAB // 2).mul_(2)
        self.ids[::7] = VOCAB + 1
        self.cu_seqlens.fill_(sum(lengths))
        self.cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
        self.poison()

    def poison(self) -> None:
        for rows in self.written:
            rows.fill_(float("nan") if rows.is_floating_point() else -1)

    def check(self) -> None:
        assert dispatch.uses_triton(self.written[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "uses_triton", lambda x: False)
            expected = self.plain()
        for rows, plain in zip(self.written, expected, strict=True):
            if rows.is_floating_point():
                torch.testing.assert_close(rows.float(), plain, rtol=2.0**-8, atol=1e-4)
            else:
                assert torch.equal(rows, plain)


class Rotary(Lookup):
    def __init__(self, num_tokens: int, num_seqs: int) -> None:
        super().__init__(num_tokens, num_seqs)
        width = (HEADS[0] + 2 * HEADS[1]) * HEAD_DIM
        cos_sin = rope_table(HEAD_DIM, 1e6, num_tokens + 9, "cuda")
        cos_sin[num_tokens:] = float("nan")
        self.embeddings = table(VOCAB, HIDDEN)
        self.table = RotaryQkvTable(table(VOCAB, width), QkRope(*HEADS, HEAD_DIM, 1e-6, None, cos_sin))
        rows = (self.embeddings.new_empty(num_tokens, size) for size in (HIDDEN, width))
        self.out = QkvRows(*rows, positions=torch.empty_like(self.ids))
        self.written = self.out.residual, self.out.qkv, self.out.positions

    def run(self) -> None:
        embed_rotary_qkv(self.ids, self.cu_seqlens, self.embeddings, self.table, self.out)

    def plain(self) -> tuple[Tensor, ...]:
        residual, qkv, positions = (torch.empty_like(rows) for rows in self.written)
        out = QkvRows(residual.float(), qkv.float(), positions)
        wide = replace(self.table, qkv=self.table.qkv.float())
        embed_rotary_qkv(self.ids, self.cu_seqlens, self.embeddings.float(), wide, out)
        return out.residual, out.qkv, out.positions


class Bert(Lookup):
    def __init__(self, num_tokens: int, num_seqs: int) -> None:
        super().__init__(num_tokens, num_seqs)
        self.types: Tensor | None = None
        norm = LayerNorm(*table(2, HIDDEN, slice(0, 2)), 1e-5)
        places = slice(OFFSET, OFFSET + num_tokens)
        self.embeddings = BertTables(
            table(VOCAB, HIDDEN), table(num_tokens + 9, HIDDEN, places), table(4, HIDDEN), norm, OFFSET
        )
        self.products = BertQkvTables(
            table(VOCAB, 3 * HIDDEN),
            table(num_tokens + 9, 3 * HIDDEN, slice(0, num_tokens)),
            table(4, 3 * HIDDEN),
            torch.randn(3 * HIDDEN, device="cuda"),
        )
        hidden, qkv = (norm.weight.new_empty(num_tokens, size) for size in (HIDDEN, 3 * HIDDEN))
        self.written = hidden, qkv

    def run(self) -> None:
        tables, (hidden, qkv) = (self.embeddings, self.products), self.written
        embed_bert_qkv(self.ids, self.cu_seqlens, self.types, tables, (hidden, qkv))

    def plain(self) -> tuple[Tensor, ...]:
        embeddings, products = self.embeddings, self.products
        norm = LayerNorm(embeddings.norm.weight.float(), embeddings.norm.bias.float(), embeddings.norm.eps)
        wide = BertTables(
            *(rows.float() for rows in (embeddings.word, embeddings.position, embeddings.token_type)),
            norm, OFFSET,
        )  # fmt: skip
        parts = (products.word, products.position, products.token_type, products.constant)
        tables = wide, BertQkvTables(*(part.float() for part in parts))
        hidden, qkv = (torch.empty_like(rows, dtype=torch.float32) for rows in self.written)
        embed_bert_qkv(self.ids, self.cu_seqlens, self.types, tables, (hidden, qkv))
        return hidden, qkv


class TypedBert(Bert):
    """With token types 0 and 2, and some that count as 0."""

    def __init__(self, num_tokens: int, num_seqs: int) -> None:
        super().__init__(num_tokens, num_seqs)
        self.types = torch.randint(0, 3, (num_tokens,), device="cuda").int() * 2


def table(rows: int, width: int, used: slice = slice(0, None, 2)) -> Tensor:
    """bf16 values around 1, and NaN in the rows that are not used."""
    made = torch.full((rows, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    made[used] = torch.randn_like(made[used])
    return made


def loaded(kind: type[Lookup], lengths: list[int]) -> Lookup:
    case = kind(sum(lengths) + 9, len(lengths) + 3)
    case.set(lengths)
    return case


kinds = pytest.mark.parametrize("kind", [Rotary, Bert, TypedBert])


@kinds
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_near_fp32(lengths, kind):
    case = loaded(kind, lengths)
    case.run()
    case.check()


@kinds
def test_the_same_bits_again(kind):
    case = loaded(kind, SHAPES["300 sequences"])
    case.run()
    first = [rows.clone() for rows in case.written]
    for early in (*Early, *Early):
        case.poison()
        with launching(early):
            case.run()
        assert all(map(torch.equal, case.written, first))


@kinds
@pytest.mark.parametrize("num_tokens", [64, 2560, 16_384])
def test_replays_with_other_lengths(num_tokens, kind):
    case = kind(num_tokens, 16)
    for _ in replays_of(case, num_tokens):
        case.check()
