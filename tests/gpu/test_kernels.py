"""Every Triton kernel on the GPU in bf16, against its plain version there, from one token to a full batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rose.device_batch import Outputs
from rose.kernels import activation, dispatch, embedding, gemm, norm, pooling, quantize, rope
from rose.kernels.gemm import GemmPlan

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
TOKENS = [1, 16, 128, 4111, 51200]
# A run takes a seed and gives all tensors that it wrote; each starts as NaN (77 in integers).
Run = Callable[[], list[Tensor]]


def _random(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(scale).to(dtype)


def _poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype, device="cuda")


def _rms(hidden: int) -> norm.RmsNorm:
    return norm.RmsNorm(_random(hidden), 1e-6)


def _layer_norm(hidden: int) -> norm.LayerNorm:
    return norm.LayerNorm(_random(hidden), _random(hidden), 1e-5)


def _offsets(num_tokens: int) -> Tensor:
    """Sequences of about 300 tokens with an empty one now and then, and up to 5 padded rows."""
    real = max(num_tokens - 5, 1)
    cuts = torch.arange(0, real, 300).repeat_interleave(2)[1:]
    return torch.cat([torch.zeros(1), cuts, torch.tensor([real])]).int().cuda()


def _same(run: Run, monkeypatch: pytest.MonkeyPatch, tolerance: float = 2.0**-7) -> None:
    """`run` through Triton and through the plain version, from the same state, gives the same tensors."""
    seed = torch.initial_seed() & 0xFFFF
    torch.manual_seed(seed)
    fast = run()
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "uses_triton", lambda x: False)
        torch.manual_seed(seed)
        plain = run()
    for actual, expected in zip(fast, plain, strict=True):
        if actual.dtype.is_floating_point:
            torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)
        else:
            assert (actual.int() - expected.int()).abs().max() <= (1 if actual.dtype == torch.int8 else 0)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hidden", [384, 1024, 2560])
def test_norms(tokens, hidden, monkeypatch):
    def rms() -> list[Tensor]:
        x, out = _random(tokens, hidden), _poisoned(tokens, hidden)
        norm.rms_norm(x, _rms(hidden), out)
        return [out]

    def add_rms(splits: int) -> list[Tensor]:
        x, residual = _random(splits, tokens, hidden), _random(tokens, hidden)
        out = _poisoned(tokens, hidden)
        norm.add_rms_norm(x if splits > 1 else x[0], residual, _rms(hidden), out)
        return [residual, out]

    def add_layer() -> list[Tensor]:
        x, residual, out = _random(tokens, hidden), _random(tokens, hidden), _poisoned(tokens, hidden)
        norm.add_layer_norm(x, residual, _random(hidden), _layer_norm(hidden), out)
        return [out]

    _same(rms, monkeypatch)
    _same(lambda: add_rms(1), monkeypatch)
    _same(lambda: add_rms(4), monkeypatch)
    _same(add_layer, monkeypatch)


@pytest.mark.parametrize("tokens", TOKENS)
def test_embeddings(tokens, monkeypatch):
    hidden = 1024

    def tokens_only() -> list[Tensor]:
        ids = torch.randint(0, 5000, (tokens,), device="cuda").int()
        out = embedding.EmbeddedTokens(
            _poisoned(tokens, hidden), _poisoned(tokens, hidden), _poisoned(tokens, dtype=torch.int32)
        )
        embedding.embed_tokens(ids, _offsets(tokens), _random(5000, hidden), _rms(hidden), out)
        return [out.residual, out.hidden, out.positions]

    def bert() -> list[Tensor]:
        ids = torch.randint(0, 5000, (tokens,), device="cuda").int()
        types = torch.randint(0, 2, (tokens,), device="cuda").int()
        tables = embedding.BertTables(
            _random(5000, hidden), _random(310, hidden), _random(2, hidden), _layer_norm(hidden), 2
        )
        out = _poisoned(tokens, hidden)
        embedding.embed_bert(ids, _offsets(tokens), types, tables, out)
        return [out]

    _same(tokens_only, monkeypatch)
    _same(bert, monkeypatch)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (4, 2, 64)])
def test_qk_norm_rope(tokens, heads, monkeypatch):
    width = (heads[0] + 2 * heads[1]) * heads[2]
    table = rope.rope_table(heads[2], 1e6, 32768, "cuda")

    def run(splits: int) -> list[Tensor]:
        layout = rope.QkRope(*heads, 1e-6, _random(2, heads[2]), table)
        positions = torch.randint(0, 32768, (tokens,), device="cuda").int()
        source = _random(splits, tokens, width)
        out = source[0] if splits == 1 else _poisoned(tokens, width)
        rope.qk_norm_rope(out if splits == 1 else source, positions, layout, out)
        return [out]

    # 3 roundings of a head's terms: one unit more than elsewhere.
    _same(lambda: run(1), monkeypatch, 2.0**-6)
    if tokens <= 128:
        _same(lambda: run(8), monkeypatch, 2.0**-6)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1536, 3072, 4096])
def test_activations(tokens, width, monkeypatch):
    def silu(splits: int) -> list[Tensor]:
        gate_up, out = _random(splits, tokens, 2 * width, scale=3), _poisoned(tokens, width)
        activation.silu_mul(gate_up if splits > 1 else gate_up[0], out)
        return [out]

    def biased(finish: Callable[[Tensor, Tensor, Tensor], None], splits: int) -> list[Tensor]:
        x, out = _random(splits, tokens, width, scale=3), _poisoned(tokens, width)
        finish(x if splits > 1 else x[0], _random(width), out)
        return [out]

    _same(lambda: silu(1), monkeypatch)
    _same(lambda: biased(activation.bias_gelu, 1), monkeypatch)
    if tokens <= 128:
        _same(lambda: silu(8), monkeypatch)
        _same(lambda: biased(activation.bias_gelu, 4), monkeypatch)
        _same(lambda: biased(activation.add_bias, 4), monkeypatch)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("quantized", [True, False])
def test_pooling(tokens, quantized, monkeypatch):
    hidden, offsets = 1024, _offsets(tokens)
    sequences = len(offsets) - 1

    def outputs() -> Outputs:
        int8 = _poisoned(sequences, hidden, dtype=torch.int8) if quantized else None
        return Outputs(_poisoned(sequences, hidden, dtype=torch.float32), int8)

    def written(result: Outputs) -> list[Tensor]:
        return [result.vectors] if result.int8 is None else [result.vectors, result.int8]

    def mean() -> list[Tensor]:
        result = outputs()
        states = _random(tokens, hidden)
        pooling.mean_pool(states, offsets, result, pooling.pool_scratch(hidden, "cuda"))
        return written(result)

    def final(how: str) -> list[Tensor]:
        result = outputs()
        last = pooling.LastHidden(_random(tokens, hidden), _random(tokens, hidden), _rms(hidden))
        if how == "mean":
            pooling.norm_mean_pool(last, offsets, result, pooling.pool_scratch(hidden, "cuda"))
        else:
            pooling.norm_gather_rows(last, offsets, how, result)
        return written(result)

    def rows() -> list[Tensor]:
        result = outputs()
        pooling.gather_rows(_random(tokens, hidden), offsets, "last", result)
        return written(result)

    def only() -> list[Tensor]:
        result = outputs()
        pooling.gather_rows(_random(sequences, hidden), offsets, "only", result)
        return written(result)

    for run in (mean, rows, only, lambda: final("mean"), lambda: final("first"), lambda: final("last")):
        _same(run, monkeypatch, 2e-5)


def test_one_long_sequence_beside_short_ones(monkeypatch):
    """The number of parts follows the batch; the mean may not."""
    offsets = torch.tensor([0, 1, 32001, 32003]).int().cuda()

    def mean() -> list[Tensor]:
        result = Outputs(_poisoned(3, 1024, dtype=torch.float32))
        pooling.mean_pool(_random(32003, 1024), offsets, result, pooling.pool_scratch(1024, "cuda"))
        return [result.vectors]

    _same(mean, monkeypatch, 2e-5)


def test_tanh_int8(monkeypatch):
    def run() -> list[Tensor]:
        out = _poisoned(333, 1024, dtype=torch.int8)
        quantize.tanh_int8(_random(333, 1024, dtype=torch.float32), out)
        return [out]

    _same(run, monkeypatch)


def _shipped_plans() -> list[tuple[int, int, GemmPlan]]:
    rows = ((n, k, choice.plan) for (n, k, _), row in gemm.table().items() for choice in row)
    return [(n, k, plan) for n, k, plan in rows if isinstance(plan, GemmPlan)]


@pytest.mark.parametrize("m", [1, 16, 63, 128, 400])
def test_shipped_plans(m):
    for n, k, plan in _shipped_plans():
        x, weight = _random(m, k), _random(n, k, scale=0.03)
        expected = x.float() @ weight.float().T
        if plan.swiglu:
            out = _poisoned(m, n // 2)
            gemm.swiglu_gemm(x, weight, plan, out)
            gate, up = expected.chunk(2, dim=1)
            expected, actual = torch.nn.functional.silu(gate) * up, out.float()
        elif plan.fused != "sum":
            actual, expected = _biased(x, weight, plan, expected)
        else:
            partials = _poisoned(plan.splits, m, n)
            gemm.split_k_gemm(x, weight, plan, partials)
            actual = partials.float().sum(0)
        # Each partial sum is rounded to bf16 once, so single elements near zero may be far off in relation.
        assert (actual - expected).norm() / expected.norm() < 4e-3
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=4e-2)


def _biased(x: Tensor, weight: Tensor, plan: GemmPlan, product: Tensor) -> tuple[Tensor, Tensor]:
    """A product that ends by itself, and what it should be."""
    bias, out = _random(len(weight)), _poisoned(*product.shape)
    gemm.bias_gemm(x, weight, bias, plan, out)
    expected = product + bias.float()
    return out.float(), torch.nn.functional.gelu(expected) if plan.fused == "gelu" else expected


@pytest.mark.parametrize("m", [1, 16, 129, 512])
@pytest.mark.parametrize("fused", ["bias", "gelu"])
def test_bias_gemm(m, fused):
    x, weight = _random(m, 1024), _random(4096, 1024, scale=0.03)
    plan = GemmPlan(1, 64, 64, 64, 4, 4, fused=fused)
    torch.testing.assert_close(*_biased(x, weight, plan, x.float() @ weight.float().T), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("m", [1, 16, 129, 512])
@pytest.mark.parametrize("rows", [16, 64])
def test_swiglu_gemm(m, rows):
    x, weight = _random(m, 1024), _random(6144, 1024, scale=0.03)
    out = _poisoned(m, 3072)
    gemm.swiglu_gemm(x, weight, GemmPlan(1, rows, 64, 64, 4, 4, fused="swiglu"), out)
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=1)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=1e-2)
