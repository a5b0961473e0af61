"""Ragged attention by torch alone, against softmax written out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.attention import sdpa
from rose.attention.base import AttentionSpec
from rose.attention.reference import reference_attention
from rose.attention.sdpa import SdpaAttention

CPU = torch.device("cpu")


def _spec(
    num_heads: int, num_kv_heads: int, head_dim: int, causal: bool, window: int | None = None
) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, 0.31, causal, torch.float32, CPU, window)


def _packed(spec: AttentionSpec, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v as views of one packed tensor, as a fused projection leaves them."""
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, sum(heads) * spec.head_dim, generator=generator)
    return qkv.view(num_tokens, sum(heads), spec.head_dim).split(heads, 1)


def _expected(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence, in fp64."""
    group = spec.num_heads // spec.num_kv_heads
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
    if spec.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    if spec.window is not None:
        seen = [[abs(i - j) <= spec.window for j in range(len(k))] for i in range(len(q))]
        scores = scores.masked_fill(~torch.tensor(seen), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).float()


def _run(spec: AttentionSpec, lengths: list[int], padding: int = 0) -> None:
    """Compare every sequence; rows past the last must stay as they were."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(offsets[-1])
    q, k, v = _packed(spec, total + padding)
    out = torch.full((total + padding, spec.num_heads, spec.head_dim), 7.0)
    attention = SdpaAttention(spec)
    attention.plan(offsets)
    attention.forward(q, k, v, out, torch.from_numpy(offsets), max(lengths, default=0))
    for begin, end in pairwise(offsets.tolist()):
        if begin < end:
            rows = slice(begin, end)
            torch.testing.assert_close(
                out[rows], _expected(spec, q[rows], k[rows], v[rows]), rtol=1e-4, atol=1e-5
            )
    assert (out[total:] == 7.0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(5, 5), (6, 2), (4, 1)])
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 9), st.just(4), st.integers(1, 80)), min_size=1, max_size=12)
)
def test_as_softmax_written_out(heads: tuple[int, int], causal: bool, lengths: list[int]) -> None:
    _run(_spec(*heads, 12, causal), lengths, padding=3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("band_rows", [4, 16, 256])
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 9), st.integers(1, 80)), min_size=1, max_size=6),
    window=st.one_of(st.integers(0, 5), st.integers(1, 90)),
)
def test_windows_as_softmax_written_out(
    band_rows: int, causal: bool, lengths: list[int], window: int
) -> None:
    """Bands of any height, at and around every edge of window, band and sequence."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sdpa, "_BAND_ROWS", band_rows)
        _run(_spec(4, 2, 12, causal, window), lengths, padding=2)


def test_a_window_of_modernbert_over_several_bands() -> None:
    _run(_spec(2, 2, 8, False, 64), [700, 64, 65, 66, 700])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 7])
def test_the_reference_of_the_gpu_tests_too(causal: bool, window: int | None) -> None:
    spec = _spec(4, 2, 12, causal, window)
    q, k, v = _packed(spec, 41)
    expected = torch.cat([_expected(spec, q[rows], k[rows], v[rows]) for rows in (slice(0, 9), slice(9, 41))])
    torch.testing.assert_close(reference_attention(q, k, v, [0, 9, 41], spec), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 128])
def test_head_dims_in_use(head_dim: int) -> None:
    _run(_spec(4, 2, head_dim, False), [3, 3, 130, 1])


def test_empty_sequences_at_either_end_and_between() -> None:
    _run(_spec(2, 2, 8, False), [0, 0, 5, 0, 5, 0, 0])


def test_equal_neighbours_go_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    plain = sdpa.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        batches.append(query.shape[0])
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", counted)
    _run(_spec(2, 2, 8, False), [4, 4, 4, 9, 4, 4])
    assert batches == [3, 1, 2]


def test_not_captured_on_a_cpu() -> None:
    attention = SdpaAttention(_spec(2, 2, 8, False))
    assert (attention.name, attention.capturable) == ("sdpa", False)
