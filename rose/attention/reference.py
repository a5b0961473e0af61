"""Ragged attention in plain fp32: what backends are measured against, by `tune` and by the tests."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rose.attention.base import AttentionSpec


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: Sequence[int], spec: AttentionSpec
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v of each sequence, f32[T, num_heads, head_dim]; rows past the last offset are 0.

    Takes what AttentionBackend.forward takes, with the offsets on the host. One head at a time: the scores of
    8192 tokens need 256 MB.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    group = spec.num_heads // spec.num_kv_heads
    for start, end in pairwise(offsets):
        if start == end:
            continue
        hidden = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        for head in range(spec.num_heads):
            keys, values = (x[start:end, head // group].float() for x in (k, v))
            scores = q[start:end, head].float() @ keys.T * spec.scale
            if spec.causal:
                scores = scores.masked_fill(hidden, float("-inf"))
            out[start:end, head] = scores.softmax(-1) @ values
    return out


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """|out - expected| / |expected| in the Frobenius norm; about 0.002 for a sound bf16 kernel."""
    return float((out.float() - expected).norm() / expected.norm())
