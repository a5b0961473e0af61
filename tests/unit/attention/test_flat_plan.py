"""How our attention kernels divide their work: plans that run, and those that an H200 measured as fast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose.attention.base import AttentionSpec
from rose.attention.flat_plan import FlatPlan, flat_plan

SHARED_BYTES = 227 * 1024


def plan_of(heads: tuple[int, int, int], num_seqs: int, length: int, from_product: bool = False) -> FlatPlan:
    spec = AttentionSpec(*heads, 1.0, False, torch.bfloat16, torch.device("cpu"))
    return flat_plan(spec, num_seqs * length, num_seqs, from_product)


@given(
    num_tokens=st.integers(1, 70_000),
    num_seqs=st.integers(1, 600),
    head_dim=st.sampled_from([64, 128]),
    group=st.integers(1, 8),
    from_product=st.booleans(),
)
def test_every_batch_has_a_plan_that_fits(num_tokens, num_seqs, head_dim, group, from_product):
    """Also more sequences than tokens: most of a graph's may be empty."""
    spec = AttentionSpec(2 * group, 2, head_dim, 1.0, False, torch.bfloat16, torch.device("cpu"))
    plan = flat_plan(spec, num_tokens, num_seqs, from_product)
    assert group % plan.heads == 0  # heads of one program share their keys
    tokens = plan.block_m // plan.heads
    assert plan.heads * tokens == plan.block_m
    assert plan.block_m >= 16  # rows of a tensor core's tile
    assert plan.block_n >= 16
    queries_and_keys = plan.block_m + 2 * plan.stages * plan.block_n
    assert queries_and_keys * head_dim * 2 <= SHARED_BYTES


@pytest.mark.parametrize("from_product", [False, True])
@pytest.mark.parametrize("heads", [(16, 8, 128), (16, 16, 64)])
@pytest.mark.parametrize("shape", [(1, 16), (1, 64), (1, 128), (4, 32), (8, 16)])
def test_few_tokens_are_spread_over_many_programs(heads, shape, from_product):
    """A multiprocessor each: at least half of all pairs of a head and 16 tokens have their own."""
    plan = plan_of(heads, *shape, from_product)
    num_tokens = shape[0] * shape[1]
    programs = -(-num_tokens // (plan.block_m // plan.heads)) * heads[0] // plan.heads
    assert programs >= min(num_tokens // 16 * heads[0] // 2, 64)


def test_keys_that_fit_are_one_tile_and_many_are_fetched_ahead():
    for length in (16, 32, 64, 128):
        plan = plan_of((16, 16, 64), 1, length)
        assert plan.block_n >= length
        assert plan.stages == 2
    assert plan_of((16, 16, 64), 1, 512).stages == 3


@pytest.mark.parametrize(
    ("heads", "shape", "from_product", "expected"),
    [
        ((16, 8, 128), (1, 16), True, FlatPlan(16, 32, 1, 4, 1)),
        ((16, 8, 128), (1, 128), True, FlatPlan(16, 64, 1, 8, 1)),
        ((16, 8, 128), (16, 32), True, FlatPlan(32, 32, 2, 4, 2)),
        ((16, 8, 128), (8, 64), False, FlatPlan(64, 64, 2, 4, 2)),
        ((16, 8, 128), (1, 256), False, FlatPlan(32, 128, 2, 4, 3)),
        ((16, 8, 128), (1, 512), False, FlatPlan(64, 64, 2, 4, 3)),
        ((16, 16, 64), (16, 32), False, FlatPlan(32, 32, 1, 4, 2)),
        ((16, 16, 64), (4, 128), False, FlatPlan(64, 64, 1, 4, 3)),
        ((16, 16, 64), (1, 512), False, FlatPlan(64, 128, 1, 4, 3)),
    ],
)
def test_what_was_measured(heads, shape, from_product, expected):
    assert plan_of(heads, *shape, from_product) == expected
