"""The first layer's QKV by tables, by Triton and in plain torch, against the embedding and the product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from rose.kernels import embedding, token_qkv
from rose.kernels.embedding import BertTables, EmbeddedTokens
from rose.kernels.jit import token_qkv as jit
from rose.kernels.norm import LayerNorm, RmsNorm
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.kernels.token_qkv import BertQkvTables, QkvRows, RotaryQkvTable
from rose.layers import token_qkv as tables

WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "triton": (jit.embed_rotary_qkv, jit.embed_bert_qkv),
    "plain": (token_qkv.embed_rotary_qkv, token_qkv.embed_bert_qkv),
}
# What a product of bf16 rows and tables in bf16 may be apart, a few roundings of 2⁻⁹.
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
VOCAB, PADDING = 60, 3
LENGTHS = ([1], [3, 0, 4, 0], [0, 0, 9, 1])
pytestmark = pytest.mark.parametrize("dtype", ERRORS)
way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are made on a CPU, too."""
    monkeypatch.setattr(tables, "_has_room", lambda embeddings, width: True)
    monkeypatch.setattr(tables, "_ROWS", 16)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def batch_of(lengths: list[int], device: str) -> tuple[Tensor, Tensor]:
    """Ids, one of them of no row, and offsets; behind the sequences rows of padding."""
    ids = torch.arange(sum(lengths) + PADDING) * 17 % VOCAB
    ids[0] = VOCAB
    return ids.int().to(device), torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < ERRORS[dtype], error


@way
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", ["normed", "large epsilons", "plain"])
def test_rotary_qkv(kind, lengths, way, dtype, device, poisoned):
    heads, dim, hidden = (3, 2), 16, 40
    width = (heads[0] + 2 * heads[1]) * dim
    words, weight = randn(VOCAB, hidden, dtype=dtype), randn(width, hidden, dtype=dtype)
    # Large ones are about the mean squares that they are added to.
    eps, head_eps = (1.0, float(hidden)) if kind == "large epsilons" else (1e-6, 1e-6)
    norm = RmsNorm(randn(hidden, dtype=dtype).to(device), eps)
    head_weight = None if kind == "plain" else randn(2, dim, dtype=dtype).to(device)
    rope = QkRope(*heads, dim, head_eps, head_weight, rope_table(dim, 1e4, 32, device))
    words, weight = words.to(device), weight.to(device)
    ids, offsets = batch_of(lengths, device)
    table = tables.rotary_qkv_table(words, norm, weight, rope)
    assert isinstance(table, RotaryQkvTable) and table.qkv.dtype == dtype

    shapes = ((len(ids), hidden, dtype), (len(ids), width, dtype))
    out = QkvRows(
        *(poisoned(m, n, dtype=kind) for m, n, kind in shapes), poisoned(len(ids), dtype=torch.int32)
    )
    WAYS[way][0](ids, offsets, words, table, out)

    rows = EmbeddedTokens(
        *(torch.empty_like(out.residual) for _ in range(2)), torch.empty_like(out.positions)
    )
    embedding.embed_tokens(ids, offsets, words, norm, rows)
    expected = linear(rows.hidden, weight)
    qk_norm_rope(expected, rows.positions, rope, expected)
    assert torch.equal(out.residual, rows.residual) and torch.equal(out.positions, rows.positions)
    near(out.qkv, expected, dtype)


@way
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("types", ["none", "given"])
@pytest.mark.parametrize(("offset", "eps"), [(0, 3.0), (2, 1e-5)])  # the variance is about 3
def test_bert_qkv(offset, eps, types, lengths, way, dtype, device, poisoned):
    hidden = 40
    word, position, kinds = (randn(rows, hidden, dtype=dtype).to(device) for rows in (VOCAB, 12, 3))
    norm = LayerNorm(*(randn(rows, dtype=dtype)[:hidden].to(device) for rows in (hidden, hidden + 1)), eps)
    weight, bias = (
        x.to(device) for x in (randn(3 * hidden, hidden, dtype=dtype), randn(3 * hidden, dtype=dtype))
    )
    embeddings = BertTables(word, position, kinds, norm, offset)
    ids, offsets = batch_of(lengths, device)
    type_ids = (ids % 4).int() if types == "given" else None  # 3 is of no row
    products = tables.bert_qkv_tables(embeddings, weight, bias)
    assert isinstance(products, BertQkvTables)

    out = poisoned(len(ids), hidden, dtype=dtype), poisoned(len(ids), 3 * hidden, dtype=dtype)
    WAYS[way][1](ids, offsets, type_ids, (embeddings, products), out)

    expected = torch.empty_like(out[0])
    embedding.embed_bert(ids, offsets, type_ids, embeddings, expected)
    near(out[0], expected, dtype)
    near(out[1], linear(expected, weight, bias), dtype)
