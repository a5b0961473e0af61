"""How `rose.kernels.jit.flat_attention` divides its work."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose.attention.base import AttentionSpec


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """One way to divide the work.

    block_m: query rows of a program, tokens times heads. heads: query heads of a program, all of one
    key/value head. block_n: keys at a time. warps: of 32 threads. stages: tiles of keys in flight; with 1,
    from the product, the first is fetched along with the queries and later ones one by one.
    """

    block_m: int
    block_n: int
    heads: int
    warps: int
    stages: int


@functools.lru_cache(maxsize=4096)
def flat_plan(spec: AttentionSpec, num_tokens: int, num_seqs: int, from_product: bool) -> FlatPlan:
    """For a batch of so many tokens in so many sequences, of q, k and v or of the QKV product."""
    if num_tokens <= 128:
        return FlatPlan(block_m=16, block_n=64, heads=1, warps=8 if from_product else 4, stages=2)
    return FlatPlan(block_m=64, block_n=64, heads=1, warps=8 if from_product else 4, stages=2)
