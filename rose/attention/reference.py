"""Ragged attention in plain fp32: what backends are measured against, by `tune` and by the tests."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

MAX_SCORES = 1 << 26  # 256 MB of fp32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rose.attention.base import AttentionSpec


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: Sequence[int], spec: AttentionSpec
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v of each sequence, f32[T, num_heads, head_dim]; rows past the last offset are 0.

    Takes what AttentionBackend.forward takes, with the offsets on the host. Scores of at most 256 MB at a
    time: all heads of a short sequence, one of a sequence of 8192 tokens.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    group = spec.num_heads // spec.num_kv_heads
    for start, end in pairwise(offsets):
        length = end - start
        if length == 0:
            continue
        hidden = _hidden(length, spec, q.device)
        step = max(1, min(spec.num_heads, MAX_SCORES // length**2))
        for head in range(0, spec.num_heads, step):
            heads = torch.arange(head, min(head + step, spec.num_heads), device=q.device)
            queries = q[start:end, heads].float().transpose(0, 1)
            keys, values = (x[start:end, heads // group].float().transpose(0, 1) for x in (k, v))
            scores = (queries @ keys.transpose(1, 2) * spec.scale).masked_fill(hidden, float("-inf"))
            out[start:end, heads] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out


def _hidden(length: int, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
    """bool[n, n]: which key each query does not see."""
    places = torch.arange(length, device=device)
    ahead = places[None, :] - places[:, None]
    hidden = ahead > 0 if spec.causal else torch.zeros_like(ahead, dtype=torch.bool)
    return hidden if spec.window is None else hidden | (ahead.abs() > spec.window)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """|out - expected| / |expected| in the Frobenius norm; about 0.002 for a sound bf16 kernel."""
    return float((out.float() - expected).norm() / expected.norm())
