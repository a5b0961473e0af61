"""How `rose.kernels.jit.flat_attention` divides its work."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose.attention.base import AttentionSpec

# From the product, keys are normed by every program that meets them: no use where a sequence has more.
MAX_PRODUCT_LENGTH = 256


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
    """For a batch of so many tokens in so many sequences, of q, k and v or of the QKV product.

    Sums up what `python -m rose.attention.tune_flat` measured on an H200: where a kernel of ours wins, no
    other plan was more than 4 % faster. Any plan is right for any batch, also where sequences are unlike.
    """
    length = -(-num_tokens // num_seqs)
    pair = 1 if (spec.num_heads // spec.num_kv_heads) % 2 else 2
    if from_product:
        return _of_product(num_tokens, length, pair)
    block_m = 16 if num_tokens <= 64 else 32 if num_tokens <= 256 else 64
    heads = 1 if block_m == 16 else pair
    block_n = 32 if length <= 32 else 64
    if length <= 32 and block_m == 64:
        block_m = 32 * heads  # of other sequences' keys, none is met
    if num_seqs == 1 and length > 64 and (spec.head_dim == 64 or num_tokens <= 256):
        block_n = 128  # the ranges of several sequences would leave it too few registers
    return FlatPlan(block_m, block_n, heads, warps=4, stages=2 if length <= block_n else 3)


def _of_product(num_tokens: int, length: int, pair: int) -> FlatPlan:
    """Keys take twice the registers here, being fp32 until they are rotated.

    64 of them fetched at once, in two partial sums, leave four warps short of up to 848 bytes a thread, says
    ptxas. That eight are faster is not measured; of the rest it is.
    """
    if num_tokens > 128:
        return FlatPlan(block_m=32 if length <= 32 else 64, block_n=32, heads=pair, warps=4, stages=2)
    if length <= 32:
        return FlatPlan(block_m=16, block_n=32, heads=1, warps=4, stages=1)
    return FlatPlan(block_m=16, block_n=64, heads=1, warps=8, stages=1)
