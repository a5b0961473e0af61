"""Embedding kernels: rows, norms, and positions from offsets with empty sequences and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.kernels import embedding
from rose.kernels.jit import embedding as jit
from rose.kernels.norm import LayerNorm, RmsNorm

DTYPES = [torch.float32, torch.bfloat16]


def _offsets(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def _places(lengths: list[int], padding: int) -> list[int]:
    return [place for length in lengths for place in range(length)] + [0] * padding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [48, 1024])
@pytest.mark.parametrize("lengths", [[1], [3, 0, 4, 0], [0, 0, 2]])
def test_embed_tokens(lengths, hidden, dtype, device, close, poisoned):
    padding = 2
    num_tokens = sum(lengths) + padding
    table = torch.randn(50, hidden, device=device).to(dtype)
    ids = torch.randint(0, 50, (num_tokens,), device=device).int()
    norm = RmsNorm(torch.randn(hidden, device=device).to(dtype), 1e-6)
    out = embedding.EmbeddedTokens(
        poisoned(num_tokens, hidden, dtype=dtype),
        poisoned(num_tokens, hidden, dtype=dtype),
        poisoned(num_tokens, dtype=torch.int32),
    )
    jit.embed_tokens(ids, _offsets(lengths, device), table, norm, out)

    rows = table[ids.long()]
    assert torch.equal(out.residual, rows)
    expected = torch.nn.functional.rms_norm(rows.float(), (hidden,), norm.weight.float(), norm.eps)
    close(out.hidden, expected.to(dtype))
    assert out.positions.tolist() == _places(lengths, padding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("types", ["none", "zero", "given"])
@pytest.mark.parametrize("offset", [0, 2])
def test_embed_bert(offset, types, dtype, device, close, poisoned):
    hidden, lengths, padding = 72, [2, 0, 3], 1
    num_tokens = sum(lengths) + padding
    word, position, token_type = (torch.randn(n, hidden, device=device).to(dtype) for n in (40, 9, 2))
    norm = LayerNorm(*(torch.randn(hidden, device=device).to(dtype) for _ in range(2)), 1e-12)
    tables = embedding.BertTables(word, position, None if types == "none" else token_type, norm, offset)
    ids = torch.randint(0, 40, (num_tokens,), device=device).int()
    kinds = torch.randint(0, 2, (num_tokens,), device=device).int() if types == "given" else None
    out = poisoned(num_tokens, hidden, dtype=dtype)
    jit.embed_bert(ids, _offsets(lengths, device), kinds, tables, out)

    places = torch.tensor(_places(lengths, padding), device=device) + offset
    total = word[ids.long()].float() + position[places].float()
    if types != "none":
        total += token_type[kinds.long() if kinds is not None else torch.zeros_like(places)].float()
    expected = torch.nn.functional.layer_norm(total, (hidden,), norm.weight.float(), norm.bias.float(), 1e-12)
    close(out, expected.to(dtype))

    plain = torch.empty(num_tokens, hidden, dtype=dtype, device=device)
    if device == "cpu":
        embedding.embed_bert(ids, _offsets(lengths, device), kinds, tables, plain)
        close(plain, expected.to(dtype))


def test_embed_bert_without_positions(device, close, poisoned):
    """Rotary encoders have a word table alone; a missing table must not be read."""
    word = torch.randn(40, 24, device=device)
    norm = LayerNorm(torch.ones(24, device=device), torch.zeros(24, device=device), 1e-5)
    ids = torch.tensor([3, 39, 0, 7], device=device).int()
    expected = torch.nn.functional.layer_norm(word[ids.long()], (24,), eps=1e-5)
    out, tables = poisoned(4, 24, dtype=torch.float32), embedding.BertTables(word, None, None, norm)
    jit.embed_bert(ids, _offsets([3], device), None, tables, out)
    close(out, expected)
    if device == "cpu":
        plain = torch.empty(4, 24)
        embedding.embed_bert(ids, _offsets([3], device), None, tables, plain)
        close(plain, expected)


@pytest.mark.parametrize("lengths", [[1], [3, 0, 4, 0], [0, 0, 2], [1] * 300])
def test_write_positions(lengths, device, poisoned):
    out = poisoned(sum(lengths) + 2, dtype=torch.int32)
    jit.write_positions(_offsets(lengths, device), out)
    assert out.tolist() == _places(lengths, 2)
    plain = torch.full((sum(lengths) + 2,), 77, dtype=torch.int32)
    embedding.write_positions(_offsets(lengths, "cpu"), plain)
    assert plain.tolist() == _places(lengths, 2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 5))
def test_token_positions(lengths, padding):
    num_tokens = sum(lengths) + padding
    places = embedding.token_positions(_offsets(lengths, "cpu"), num_tokens)
    assert places.dtype == torch.int32
    assert places.tolist() == _places(lengths, padding)


@pytest.mark.parametrize("num_seqs", [255, 256, 600])
def test_positions_with_more_sequences_than_one_scan(num_seqs, device, poisoned):
    """Mostly empty ones, with the tokens at both ends, at the edges of a scan of 256 offsets, and between."""
    lengths = [0] * num_seqs
    for place, length in ((0, 2), (254, 1), (255, 3), (300, 2), (400, 3), (num_seqs - 1, 4)):
        lengths[min(place, num_seqs - 1)] = length
    tokens = sum(lengths) + 1
    out = embedding.EmbeddedTokens(
        torch.empty(tokens, 16, device=device),
        torch.empty(tokens, 16, device=device),
        poisoned(tokens, dtype=torch.int32),
    )
    ids = torch.zeros(tokens, dtype=torch.int32, device=device)
    norm = RmsNorm(torch.ones(16, device=device), 1e-6)
    jit.embed_tokens(ids, _offsets(lengths, device), torch.ones(1, 16, device=device), norm, out)
    assert out.positions.tolist() == _places(lengths, 1)


@pytest.mark.parametrize("wrong", [40, -1, 2**31 - 1, -(2**31)])
def test_an_id_or_type_out_of_range_reads_row_0_and_nothing_outside(wrong, device, close, poisoned):
    hidden, lengths = 24, [3]
    word, position, token_type = (torch.randn(n, hidden, device=device) for n in (40, 9, 2))
    rms = RmsNorm(torch.ones(hidden, device=device), 1e-6)
    layer = LayerNorm(torch.ones(hidden, device=device), torch.zeros(hidden, device=device), 1e-5)
    tables = embedding.BertTables(word, position, token_type, layer)
    given, read = (torch.tensor([3, one, 39], device=device).int() for one in (wrong, 0))
    types = torch.tensor([1, wrong, 0], device=device).int()
    read_types = torch.tensor([1, 0, 0], device=device).int()

    def embedded(kernels, ids, kinds):
        decoder = embedding.EmbeddedTokens(
            poisoned(3, hidden, dtype=torch.float32),
            poisoned(3, hidden, dtype=torch.float32),
            poisoned(3, dtype=torch.int32),
        )
        encoder = poisoned(3, hidden, dtype=torch.float32)
        kernels.embed_tokens(ids, _offsets(lengths, device), word, rms, decoder)
        kernels.embed_bert(ids, _offsets(lengths, device), kinds, tables, encoder)
        return decoder.residual, decoder.hidden, encoder

    for kernels in (jit, embedding):
        for got, expected in zip(
            embedded(kernels, given, types), embedded(kernels, read, read_types), strict=True
        ):
            assert torch.equal(got, expected)
