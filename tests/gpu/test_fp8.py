"""FP8 on the GPU: kernels and products against their plain versions, models against fp32 and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rose.aot.products import ProductKernel
from rose.attention.backends import load_backends
from rose.attention.base import begin
from rose.batch import RaggedBatch
from rose.config import ModelConfig, load_config
from rose.device_batch import DeviceBatch, Outputs
from rose.engine import EngineOptions, load_engine
from rose.kernels import dispatch, fp8
from rose.kernels.fp8 import Fp8Rows, NormedRows, ScaledSquare
from rose.kernels.fused import load
from rose.kernels.norm import LayerNorm, RmsNorm
from rose.kernels.rope import QkRope, qk_norm_rope, rope_table
from rose.layers.fp8_linear import CAPABILITY, Fp8Gated, Fp8Linear, Fp8Scratch
from rose.layers.fp8_weights import Fp8Weights
from rose.models import bert, qwen3
from rose.models.registry import Model, build_model
from rose.reference import reference_vectors
from rose.weights import WeightSource, dummy_weights

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY,
        reason="this GPU multiplies no FP8",
    ),
]

PRESETS = Path(__file__).resolve().parents[2] / "rose" / "presets"
MAX_TOKENS = 1024
TOKENS = [1, 16, 128, 4111, 51200]
LENGTHS = [1, 77, 300, 5, 64]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA).bfloat16()


def _norm_weights(width: int) -> LayerNorm:
    return LayerNorm(_random(width), _random(width), 1e-5)


def _quantize(tokens: int, width: int, out: Fp8Rows) -> list[Tensor]:
    fp8.quantize_rows(_random(tokens, width), out)
    return []


def _rms(tokens: int, width: int, out: Fp8Rows) -> list[Tensor]:
    residual = _random(tokens, width)
    fp8.add_rms_norm_fp8(_random(tokens, width), residual, RmsNorm(_random(width), 1e-6), out)
    return [residual]


def _rms_by_length(tokens: int, width: int, out: Fp8Rows) -> list[Tensor]:
    residual, square = _random(tokens, width), ScaledSquare(torch.zeros(tokens, 1, device=CUDA), 3.0)
    norm = RmsNorm(_random(width), 1e-6)
    fp8.add_rms_norm_by_length(_random(tokens, width), residual, norm, out, square)
    return [residual, square.values]


def _layer_norm(tokens: int, width: int, out: Fp8Rows) -> list[Tensor]:
    rows = torch.full((tokens, width), float("nan"), device=CUDA).bfloat16()
    x, residual, bias = _random(tokens, width), _random(tokens, width), _random(width)
    fp8.add_layer_norm_fp8(x, residual, bias, _norm_weights(width), NormedRows(rows, out))
    return [rows]


def _silu(tokens: int, width: int, out: Fp8Rows) -> list[Tensor]:
    fp8.silu_mul_fp8(_random(tokens, 2 * width), out)
    return []


def _gelu(tokens: int, width: int, out: Fp8Rows) -> list[Tensor]:
    fp8.bias_gelu_fp8(_random(tokens, width), _random(width), out)
    return []


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("run", "width"),
    [
        (_quantize, 1024), (_quantize, 4096), (_quantize, 384), (_rms, 1024), (_rms, 2560),
        (_rms_by_length, 1024), (_rms_by_length, 2560),
        (_layer_norm, 1024), (_layer_norm, 384), (_silu, 3072), (_gelu, 4096), (_gelu, 1536),
    ],
)  # fmt: skip
def test_kernels(
    run: Callable[[int, int, Fp8Rows], list[Tensor]],
    width: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for triton in (True, False):
        torch.manual_seed(tokens)
        monkeypatch.setattr(dispatch, "uses_triton", lambda x, triton=triton: triton)
        out = Fp8Rows.empty(tokens, width, CUDA)
        out.scale.fill_(float("nan"))
        found.append((out, run(tokens, width, out)))
    (actual, tensors), (expected, plain) = found
    for one, other in zip(tensors, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=2.0**-7)
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-4, atol=0)
    a, b = actual.values.float(), expected.values.float()
    torch.testing.assert_close(a, b, rtol=2.0**-3, atol=2.0**-8)
    assert (a != b).float().mean() <= 0.01


@pytest.mark.parametrize("tokens", TOKENS)
def test_heads(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product, normed, rotated and rounded; some scales are too small, so that numbers do not fit."""
    product, weight, table = _random(tokens, 32 * 128), _random(2, 128), rope_table(128, 1e6, 512, CUDA)
    positions = torch.randint(0, 512, (tokens,), device=CUDA).int()
    scales = torch.logspace(-3, 0, 32, device=CUDA)
    rope, found = QkRope(16, 8, 128, 1e-6, weight, table), []
    for triton in (True, False):
        monkeypatch.setattr(dispatch, "uses_triton", lambda x, triton=triton: triton)
        out = torch.full_like(product, float("nan")).to(torch.float8_e4m3fn)
        qk_norm_rope(product, positions, rope, out, scales)
        found.append(out.float())
    assert found[0].abs().amax() == 448
    torch.testing.assert_close(*found, rtol=2.0**-3, atol=2.0**-8)
    assert (found[0] != found[1]).float().mean() <= 0.01


def test_wide_silu() -> None:
    """Of the 4B models: a row is more than the kernel's 8192 elements."""
    x = _random(300, 2 * 9728)
    out = fp8.silu_mul_fp8(x, Fp8Rows.empty(300, 9728, CUDA)).float()
    expected = torch.nn.functional.silu(x[:, :9728].float()) * x[:, 9728:].float()
    assert torch.nn.functional.cosine_similarity(out, expected).min() > 0.999


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 300, 4111])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (384, 1536), (48, 64)])
def test_product(n: int, k: int, rows: int, biased: bool) -> None:
    """What cuBLAS makes of the numbers and scales is what they stand for, for any number of rows."""
    bias = _random(n) if biased else None
    weight = fp8.quantized(torch.randn(n, k, device=CUDA), Fp8Rows.empty(n, k, CUDA))
    x = Fp8Scratch(rows, k, CUDA).rows(rows, k)
    fp8.quantize_rows(_random(rows, k) * torch.logspace(-3, 3, rows, device=CUDA)[:, None].bfloat16(), x)
    out = torch.full((rows, n), float("nan"), device=CUDA).bfloat16()
    assert Fp8Linear(weight, bias)(x, out) is out
    expected = x.float() @ weight.float().t()
    expected = expected if bias is None else expected + bias.float()
    error = (out.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.01


def test_a_nan_fills_its_row_and_no_other() -> None:
    weight = fp8.quantized(torch.randn(64, 64, device=CUDA), Fp8Rows.empty(64, 64, CUDA))
    for bad in (float("nan"), float("inf")):
        x = _random(20, 64)
        x[3, 5] = bad
        rows = fp8.quantize_rows(x, Fp8Scratch(20, 64, CUDA).rows(20, 64))
        product = Fp8Linear(weight)(rows, torch.zeros(20, 64, device=CUDA).bfloat16())
        assert product[3].isnan().all() and product[:3].isfinite().all() and product[4:].isfinite().all()


def _load(alias: str, **changes: int) -> tuple[Model, WeightSource]:
    config = replace(load_config(PRESETS / alias), **changes)
    weights = dummy_weights(config, 1, CUDA)
    with pytest.MonkeyPatch.context() as patched:
        for module in (bert, qwen3):
            patched.setattr(module, "compile_ahead", lambda *arguments: None)
        source = Fp8Weights(weights, CUDA, MAX_TOKENS)
        return build_model(config, source, torch.bfloat16, CUDA, MAX_TOKENS), weights


def _sequences(config: ModelConfig, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, config.vocab_size, length, np.int32) for length in lengths]


def _batch(
    model: Model, sequences: list[np.ndarray], padded_to: int, attention: str | None = None
) -> DeviceBatch:
    """Padded, and with one empty sequence. attention: a backend's name; None: the first at hand."""
    offsets = np.cumsum([0, *map(len, sequences), 0], dtype=np.int32)
    ids = torch.zeros(padded_to, dtype=torch.int32)
    ids[: offsets[-1]] = torch.from_numpy(np.concatenate(sequences))
    backends = load_backends(model.attention_spec, compile_missing=False)
    if attention is not None and attention not in backends:
        pytest.skip(f"{attention} is not available")
    backend = backends[attention or next(iter(backends))]
    backend.plan(offsets)
    cu_seqlens = torch.from_numpy(offsets).to(CUDA)
    begin(backend, cu_seqlens, padded_to)
    return DeviceBatch(ids.to(CUDA), cu_seqlens, None, offsets, padded_to, backend)


def _outputs(model: Model, num_seqs: int) -> Outputs:
    vectors = torch.full((num_seqs, model.config.hidden_size), float("nan"), device=CUDA)
    int8 = torch.zeros(vectors.shape, dtype=torch.int8, device=CUDA) if model.config.quantizer else None
    return Outputs(vectors, int8)


@pytest.mark.parametrize("alias", ["pplx-embed", "qwen3-embedding", "bge-m3", "minilm"])
def test_models_are_near_fp32(alias: str) -> None:
    """At full size, tokens padded and not, one sequence alone too."""
    model, weights = _load(alias)
    for lengths, padded_to in ((LENGTHS, 512), (LENGTHS, sum(LENGTHS)), ([128], 128), ([7], 16)):
        sequences = _sequences(model.config, lengths)
        outputs = _outputs(model, len(sequences) + 1)
        with torch.inference_mode():
            model.forward(_batch(model, sequences, padded_to), outputs)
        expected = reference_vectors(model.config, weights, sequences, device=CUDA.type)
        vectors = outputs.vectors[:-1].cpu()
        cosines = torch.nn.functional.cosine_similarity(vectors.double(), expected.double())
        print(f"{alias} {lengths} in {padded_to}: cosine to fp32 at least {cosines.min():.6f}")
        assert cosines.min() > 0.98


@pytest.mark.parametrize("alias", ["pplx-embed", "qwen3-embedding"])
def test_models_with_attention_in_fp8_are_near_fp32(alias: str) -> None:
    """And about as near as with attention in bf16; a sequence alone is what it is among others."""
    model, weights = _load(alias)
    sequences = _sequences(model.config, [512, *LENGTHS])
    expected = reference_vectors(model.config, weights, sequences, device=CUDA.type).double()
    found = {}
    for attention in ("flashinfer-fa3-fp8", None):
        outputs = _outputs(model, len(sequences) + 1)
        with torch.inference_mode():
            model.forward(_batch(model, sequences, 1024, attention), outputs)
        found[attention] = outputs.vectors[:-1].cpu().double()
        cosines = torch.nn.functional.cosine_similarity(found[attention], expected)
        print(f"{alias}, attention {attention or 'in bf16'}: cosine to fp32 at least {cosines.min():.6f}")
        assert cosines.min() > 0.97
    for row, sequence in enumerate(sequences):
        outputs = _outputs(model, 2)
        with torch.inference_mode():
            model.forward(_batch(model, [sequence], 512, "flashinfer-fa3-fp8"), outputs)
        alone = outputs.vectors[:1].cpu().double()
        assert torch.nn.functional.cosine_similarity(alone, found["flashinfer-fa3-fp8"][row : row + 1]) > 0.99


def test_swiglu_stored_in_fp8_is_as_near_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = load(ProductKernel.parse("gemm-fp8-swiglu-fp8-128x192x128-pingpong-2x1"))
    if kernel is None:
        pytest.skip("not built")
    model, weights = _load("pplx-embed")
    sequences = _sequences(model.config, LENGTHS)
    expected = reference_vectors(model.config, weights, sequences, device=CUDA.type).double()
    cosines = []
    for fused in (None, kernel):
        monkeypatch.setattr(Fp8Gated, "storing_fp8", lambda self, num_tokens, fused=fused: fused)
        outputs = _outputs(model, len(sequences) + 1)
        with torch.inference_mode():
            model.forward(_batch(model, sequences, 512), outputs)
        vectors = outputs.vectors[:-1].cpu().double()
        cosines.append(torch.nn.functional.cosine_similarity(vectors, expected).min())
    print(f"SwiGLU by way of bf16: cosine to fp32 at least {cosines[0]:.6f}, stored in FP8: {cosines[1]:.6f}")
    assert cosines[1] > 0.98


@pytest.mark.parametrize("attention", [None, "flashinfer-fa3-fp8"])
def test_one_graph_serves_batches_of_any_lengths(attention: str | None) -> None:
    model, _ = _load("pplx-embed", num_layers=3)
    graph, held = torch.cuda.CUDAGraph(), _outputs(model, len(LENGTHS) + 1)
    batch = _batch(model, _sequences(model.config, LENGTHS), 512, attention)
    with torch.inference_mode():
        model.forward(batch, held)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            begin(batch.attention, batch.cu_seqlens, 512)
            model.forward(batch, held)
    for lengths in ([512, 0, 0, 0, 0], [1, 100, 3, 300, 50], [7, 0, 9, 0, 1]):
        other = _batch(model, _sequences(model.config, lengths), 512, attention)
        batch.input_ids.copy_(other.input_ids)
        batch.cu_seqlens.copy_(other.cu_seqlens)
        graph.replay()
        eager = _outputs(model, len(LENGTHS) + 1)
        with torch.inference_mode():
            model.forward(other, eager)
        real = torch.tensor([length > 0 for length in lengths] + [False])
        cosines = torch.nn.functional.cosine_similarity(held.vectors[real], eager.vectors[real])
        assert cosines.min() > 0.999, lengths


@pytest.mark.parametrize(
    ("alias", "attention"), [("pplx-embed", None), ("pplx-embed", "flashinfer-fa3-fp8"), ("bge-m3", None)]
)
def test_a_forward_can_be_captured(alias: str, attention: str | None) -> None:
    model, _ = _load(alias, num_layers=3)
    sequences = _sequences(model.config, LENGTHS)
    batch = _batch(model, sequences, 512, attention)
    eager, captured = (_outputs(model, len(sequences) + 1) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        model.forward(batch, eager)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            model.forward(batch, captured)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.nn.functional.cosine_similarity(captured.vectors[:-1], eager.vectors[:-1]).min() > 0.999


def test_an_engine_serves_fp8_eagerly_and_from_graphs() -> None:
    """And a sequence's row is its own whatever it is batched with."""
    options = EngineOptions(dtype="fp8", device="cuda", max_batch_tokens=1024)
    engine = load_engine(PRESETS / "minilm", options, dummy=True, model_name="test")
    assert engine.info.dtype == "fp8"
    rng = np.random.default_rng(0)
    lengths = [min(length, engine.info.max_model_len) for length in LENGTHS]
    sequences = [rng.integers(1000, 20_000, length, np.int32) for length in lengths]
    batch = RaggedBatch.pack(sequences)
    results = [engine.step(batch).result().vectors.copy() for _ in range(4)]
    alone = np.concatenate([engine.step(RaggedBatch.pack([ids])).result().vectors for ids in sequences])
    engine.close()
    for vectors in (*results, alone):
        cosines = torch.nn.functional.cosine_similarity(*map(torch.from_numpy, (vectors, results[0])))
        assert cosines.min() > 0.999
