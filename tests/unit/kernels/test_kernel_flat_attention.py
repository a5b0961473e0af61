"""Attention over flat tiles against fp32: ragged lengths, padding, grouped heads, causal, of the product."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch

from rose.attention.base import AttentionSpec
from rose.attention.flat_plan import FlatPlan
from rose.attention.reference import reference_attention, relative_error
from rose.kernels.jit import flat_attention as jit
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table

# The interpreter multiplies no bf16; fp16 takes the same path through the kernel.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# Two roundings of the type at most: 480 random cases in fp16 were off by 2.4e-4 (median) and 4.7e-4 at most.
MAX_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
if torch.cuda.is_available():
    MAX_ERROR[torch.float32] = 2e-3  # its tensor cores multiply TF32
LENGTHS = {
    "1": [1],
    "whole tiles": [32],
    "empty first and last": [0, 0, 7, 25, 0],
    "many tiny": [i % 2 for i in range(70)],
}
PADDING = 6
PLAN = FlatPlan(block_m=16, block_n=16, heads=1, warps=4, stages=2)


def spec_of(heads: tuple[int, int, int], causal: bool, dtype: torch.dtype, device: str) -> AttentionSpec:
    return AttentionSpec(*heads, heads[2] ** -0.5, causal, dtype, torch.device(device))


def offsets_of(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def assert_attends(out, qkv, lengths, spec) -> None:
    """Real rows of out are qkv's attention, and others are untouched."""
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    q, k, v = torch.split(qkv.view(len(qkv), -1, spec.head_dim), heads, dim=1)
    total = sum(lengths)
    expected = reference_attention(q, k, v, offsets_of(lengths), spec)
    assert relative_error(out[:total], expected[:total]) < MAX_ERROR[spec.dtype]
    assert out[total:].isnan().all()


def poisoned_product(shape: tuple[int, ...], lengths: list[int], spec: AttentionSpec) -> torch.Tensor:
    """Values around 1 in real rows, NaN in padded ones: reading these would show."""
    product = torch.randn(shape, device=spec.device).to(spec.dtype)
    product[..., sum(lengths) :, :] = float("nan")
    return product


def width(spec: AttentionSpec) -> int:
    return (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim


@pytest.mark.parametrize(("causal", "dtype"), [(False, DTYPE), (True, torch.float32)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_of_q_k_and_v(lengths, causal, dtype, device, poisoned):
    heads = (2, 1, 16)
    spec = spec_of(heads, causal, dtype, device)
    num_tokens = sum(lengths) + PADDING
    qkv = poisoned_product((num_tokens, width(spec)), lengths, spec)
    parts = torch.split(qkv.view(num_tokens, -1, heads[2]), [heads[0], heads[1], heads[1]], dim=1)
    cu_seqlens = torch.tensor(offsets_of(lengths), dtype=torch.int32, device=device)
    out = poisoned(num_tokens, heads[0], heads[2], dtype=dtype)
    jit.flat_attention(parts, cu_seqlens, spec, PLAN, out)
    assert_attends(out, qkv, lengths, spec)


@pytest.mark.parametrize(
    ("causal", "dtype", "splits"), [(False, DTYPE, 3), (False, torch.float32, None), (True, DTYPE, None)]
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_of_the_product(lengths, causal, dtype, splits, device, poisoned):
    """Normed and rotated as by the kernel of its own; partial sums are added first."""
    spec = spec_of((2, 1, 32), causal, dtype, device)
    num_tokens = sum(lengths) + PADDING
    shape = (num_tokens, width(spec)) if splits is None else (splits, num_tokens, width(spec))
    product = poisoned_product(shape, lengths, spec)
    weight = 1 + 0.2 * torch.randn(2, 32, device=device)
    rope = QkRope(2, 1, 32, 1e-6, weight, rope_table(32, 1e4, 64, device))
    cu_seqlens = torch.tensor(offsets_of(lengths), dtype=torch.int32, device=device)
    out = poisoned(num_tokens, 2, 32, dtype=dtype)
    jit.flat_attention_of_product(product, rope, cu_seqlens, spec, PLAN, out)
    assert_attends(out, rotated(product, lengths, rope), lengths, spec)


def test_a_bias_and_no_norm(device, poisoned):
    """Qwen2's and Llama's heads."""
    spec, lengths = spec_of((2, 1, 32), False, torch.float32, device), [9, 20]
    product = poisoned_product((29 + PADDING, width(spec)), lengths, spec)
    bias = torch.randn(width(spec), device=device)
    rope = QkRope(2, 1, 32, 1e-6, None, rope_table(32, 1e4, 64, device), bias)
    cu_seqlens = torch.tensor([0, 9, 29], dtype=torch.int32, device=device)
    out = poisoned(len(product), 2, 32, dtype=torch.float32)
    jit.flat_attention_of_product(product, rope, cu_seqlens, spec, PLAN, out)
    assert_attends(out, rotated(product, lengths, rope), lengths, spec)


PLANS = (
    {"heads": 2},
    {"heads": 4, "block_n": 64, "stages": 1},
    {"block_m": 64, "stages": 1},
    {"block_n": 128, "block_m": 32},
)


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        *product([[20, 0, 25, 9]], PLANS),
        ([45], PLANS[1]),
        *(pytest.param([45], plan, marks=pytest.mark.long) for plan in (PLANS[0], *PLANS[2:])),
    ],
)
def test_any_plan(changes, lengths, device, poisoned):
    spec, plan = spec_of((8, 2, 16), False, torch.float32, device), replace(PLAN, **changes)
    num_tokens = sum(lengths) + PADDING
    product = poisoned_product((num_tokens, width(spec)), lengths, spec)
    rope = QkRope(8, 2, 16, 1e-6, None, rope_table(16, 1e4, 64, device))
    cu_seqlens = torch.tensor(offsets_of(lengths), dtype=torch.int32, device=device)
    out = poisoned(num_tokens, 8, 16, dtype=torch.float32)
    jit.flat_attention_of_product(product, rope, cu_seqlens, spec, plan, out)
    qkv = rotated(product, lengths, rope)
    assert_attends(out, qkv, lengths, spec)
    out.fill_(float("nan"))
    jit.flat_attention(
        torch.split(qkv.view(num_tokens, -1, 16), [8, 2, 2], dim=1), cu_seqlens, spec, plan, out
    )
    assert_attends(out, qkv, lengths, spec)


def rotated(product: torch.Tensor, lengths: list[int], rope: QkRope) -> torch.Tensor:
    """f32[T, (Hq + 2 Hk) D] by the plain version."""
    places = [place for length in lengths for place in range(length)] + [0] * PADDING
    source = (product if product.dim() == 3 else product[None]).float().cpu()
    on_cpu = replace(
        rope,
        weight=None if rope.weight is None else rope.weight.cpu(),
        bias=None if rope.bias is None else rope.bias.cpu(),
        cos_sin=rope.cos_sin.cpu(),
    )
    qkv = torch.empty(source.shape[1:])
    qk_norm_rope(source, torch.tensor(places, dtype=torch.int32), on_cpu, qkv)
    return qkv.to(product.device)
