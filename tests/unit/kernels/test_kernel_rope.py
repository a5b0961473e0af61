"""The q/k norm and rotation against transformers' Qwen3, in place and from split-K partial sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from rose.kernels import rope
from rose.kernels.fp8 import E4M3
from rose.kernels.jit import rope as jit

DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(2, 1, 128), (4, 2, 64), (3, 3, 24)]


def _layout(heads: tuple[int, int, int], device: str) -> rope.QkRope:
    query, key, dim = heads
    weight = 1 + 0.2 * torch.randn(2, dim, device=device)
    return rope.QkRope(query, key, dim, 1e-6, weight, rope.rope_table(dim, 1e6, 600, device))


def _expected(qkv: torch.Tensor, positions: torch.Tensor, layout: rope.QkRope) -> torch.Tensor:
    """As transformers computes it, in fp32."""
    rows = qkv.float().cpu().view(len(qkv), -1, layout.head_dim)
    query, key, value = rows.split([layout.num_heads, layout.num_kv_heads, layout.num_kv_heads], dim=1)
    inverse = 1e6 ** (-torch.arange(0, layout.head_dim, 2).double() / layout.head_dim)
    angles = (positions.cpu().double()[:, None] * inverse).repeat(1, 2)
    normed = []
    for row, weight in zip((query, key), layout.weight.cpu(), strict=True):
        norm = Qwen3RMSNorm(layout.head_dim, eps=layout.eps)
        norm.weight.data = weight
        normed.append(norm(row))
    cos, sin = angles.cos().float()[None], angles.sin().float()[None]
    turned = apply_rotary_pos_emb(*(row.transpose(0, 1)[None] for row in normed), cos, sin)
    query, key = (row[0].transpose(0, 1) for row in turned)
    return torch.cat([query, key, value], dim=1).flatten(1).detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_in_place(num_tokens, heads, dtype, device, close):
    layout = _layout(heads, device)
    width = (heads[0] + 2 * heads[1]) * heads[2]
    qkv = (2 * torch.randn(num_tokens, width, device=device)).to(dtype)
    positions = torch.randint(0, 600, (num_tokens,), device=device).int()
    expected = _expected(qkv, positions, layout).to(dtype)
    values = qkv[:, layout.rotated_heads * heads[2] :].clone()
    plain = qkv.cpu().clone()

    jit.qk_norm_rope(qkv, positions, layout, qkv)
    close(qkv.cpu(), expected)
    assert torch.equal(qkv[:, layout.rotated_heads * heads[2] :], values)

    on_cpu = rope.QkRope(*heads, 1e-6, layout.weight.cpu(), layout.cos_sin.cpu())
    rope.qk_norm_rope(plain, positions.cpu(), on_cpu, plain)
    close(plain, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("splits", [1, 3])
def test_from_partial_sums(splits, heads, dtype, device, close, poisoned):
    layout = _layout(heads, device)
    width = (heads[0] + 2 * heads[1]) * heads[2]
    partials = torch.randn(splits, 5, width, device=device).to(dtype)
    positions = torch.arange(5, device=device).int()
    out = poisoned(5, width, dtype=dtype)
    jit.qk_norm_rope(partials, positions, layout, out)
    close(out.cpu(), _expected(partials.float().sum(0), positions, layout).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("splits", [None, 2])
@pytest.mark.parametrize("heads", HEADS)
def test_bias_and_no_norm(heads, splits, biased, dtype, device, close, poisoned):
    """Qwen2 adds a bias to q, k and v; neither it nor an encoder with rotation norms its heads."""
    query, key, dim = heads
    width = (query + 2 * key) * dim
    bias = torch.randn(width, device=device).to(dtype) if biased else None
    table = rope.rope_table(dim, 1e4, 600, device)
    layout = rope.QkRope(query, key, dim, 1e-6, None, table, bias)
    source = torch.randn((splits or 1, 5, width), device=device).to(dtype)
    positions = torch.tensor([0, 1, 599, 3, 0], device=device).int()
    total = source.float().sum(0) + (bias.float() if biased else 0.0)

    cos, sin = (part.repeat(1, 1, 2) for part in table[positions.long()][:, None].chunk(2, dim=-1))
    turned = total.view(5, -1, dim)[:, : query + key]
    turned = turned * cos + torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], dim=-1) * sin
    expected = torch.cat([turned.flatten(1), total[:, (query + key) * dim :]], dim=1).to(dtype)

    def run(function, device_source, device_positions, device_layout):
        out = poisoned(5, width, dtype=dtype).to(device_source.device) if splits else device_source[0]
        function(device_source if splits else out, device_positions, device_layout, out)
        close(out.cpu(), expected.cpu())

    on_cpu = rope.QkRope(query, key, dim, 1e-6, None, table.cpu(), bias.cpu() if biased else None)
    run(rope.qk_norm_rope, source.cpu().clone(), positions.cpu(), on_cpu)
    run(jit.qk_norm_rope, source, positions, layout)


@pytest.mark.usefixtures("right_casts")
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_in_fp8(heads, dtype, normed, device):
    """What a number times its head's scale stands for is what a plain forward writes, to a sixteenth."""
    query, key, dim = heads
    layout = _layout(heads, device)
    if not normed:
        bias = torch.randn((query + 2 * key) * dim, device=device).to(dtype)
        layout = replace(layout, weight=None, bias=bias)
    product = torch.randn(7, (query + 2 * key) * dim, device=device).to(dtype)
    positions = torch.randint(0, 600, (7,), device=device).int()
    exact = product.float().clone()
    jit.qk_norm_rope(exact, positions, layout, exact)
    scales = torch.logspace(-3, 0, query + 2 * key, device=device)
    out, kept = torch.full_like(product, float("nan")).to(E4M3), product.clone()
    jit.qk_norm_rope(product, positions, layout, out, scales)
    assert torch.equal(product, kept)

    found, expected = (x.cpu().float().view(7, -1, dim) for x in (out, exact))
    expected = (expected / scales.cpu()[:, None]).clamp(-448, 448)
    assert expected.abs().amax() == 448  # the smallest scales are too small
    torch.testing.assert_close(found, expected, rtol=2.0**-4, atol=2.0**-9)

    parts = {"weight": layout.weight, "cos_sin": layout.cos_sin, "bias": layout.bias}
    on_cpu = replace(layout, **{name: x if x is None else x.cpu() for name, x in parts.items()})
    plain = torch.zeros_like(product).to(E4M3).cpu()
    rope.qk_norm_rope(product.cpu(), positions.cpu(), on_cpu, plain, scales.cpu())
    found = found.flatten()
    close = torch.isclose(found, plain.float().flatten(), rtol=2.0**-3, atol=2.0**-8)
    assert close.all()
    assert (found != plain.float().flatten()).float().mean() <= 0.03  # where a hair decides


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # NumPy's, of the interpreter
@pytest.mark.usefixtures("right_casts")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("triton", [True, False])
def test_what_is_not_finite_shows_in_fp8_too(triton, bad, device):
    layout = _layout((2, 1, 64), device if triton else "cpu")
    product = torch.randn(3, 256, device=layout.cos_sin.device)
    product[1, 5] = bad
    product[2, 255] = float("nan")
    out = torch.zeros_like(product).to(E4M3)
    positions, scales = torch.arange(3, device=product.device).int(), torch.ones(4, device=product.device)
    (jit if triton else rope).qk_norm_rope(product, positions, layout, out, scales)
    shown = out.cpu().float().view(3, 4, 64).isnan().any(-1).tolist()
    assert shown == [[False] * 4, [True, False, False, False], [False, False, False, True]]


def test_many_rows_a_program(device, close, monkeypatch):
    """The tile for large batches gives what the tile for small ones gives."""
    layout = _layout((2, 1, 64), device)
    qkv = torch.randn(11, 256, device=device)
    positions = torch.arange(11, device=device).int()
    expected = _expected(qkv, positions, layout)
    monkeypatch.setattr(jit, "rows_a_program", lambda programs: 4)
    jit.qk_norm_rope(qkv, positions, layout, qkv)
    close(qkv.cpu(), expected)


def test_rope_table_stays_exact_far_out():
    """At position 32767 an fp32 angle would be off by 1e-3."""
    table = rope.rope_table(128, 1e6, 32768, "cpu")
    angle = torch.tensor(32767.0, dtype=torch.float64) * 1e6 ** (-2 / 128)
    assert abs(table[32767, 1] - angle.cos()) < 1e-7
    assert abs(table[32767, 65] - angle.sin()) < 1e-7
