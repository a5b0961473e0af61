"""Products with fused epilogues on the GPU against fp32, outputs poisoned: alone, in layers, in graphs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rose.aot.folders import default_folders
from rose.aot.library import KernelLibrary
from rose.aot.products import DEFAULT_PRODUCTS, HEAD_DIM, HEAD_EPS, RESIDUAL_PRODUCT, ProductKernel
from rose.kernels.fp8 import E4M3, Fp8Rows, quantized
from rose.kernels.fused import FusedGemm, load
from rose.kernels.norm import RmsNorm, add_rms_norm
from rose.kernels.rope import QkRope, rope_table
from rose.kernels.row_scale import row_scale
from rose.layers.decoder import DecoderLayer
from rose.layers.fused_decoder import FusedDecoder, LayerWeights, rope_columns, with_pairs_adjacent
from rose.layers.projection import BiasedProjection, GatedProjection, Projection
from rose.layers.workspace import DecoderBuffers
from tests.unit.kernels.fused_fake import fake_gemm

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
PADDING = 7  # rows past M that must stay as they are
HIDDEN, INNER, HEADS, KV_HEADS = 1024, 3072, 16, 8
QUERY, QKV = HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM


def random(*shape: int, std: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(std=std)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def loaded(kernel: ProductKernel) -> FusedGemm:
    gemm = load(kernel)
    if gemm is None:
        pytest.skip(f"{kernel.name} is not built")
    return gemm


def rope() -> QkRope:
    table = rope_table(HEAD_DIM, 1e6, 512, "cuda")
    return QkRope(HEADS, KV_HEADS, HEAD_DIM, HEAD_EPS, random(2, HEAD_DIM), table)


def outputs_of(gemm: FusedGemm, x: Tensor, seed: int) -> list[Tensor]:
    """Everything that one product writes, of M + PADDING rows; the same inputs for the same seed."""
    torch.manual_seed(seed)
    m, name = len(x), gemm.kernel.epilogue
    scale = torch.rand(m, device="cuda") + 0.5
    if name.startswith("rms-"):  # 11 partial sums, of squares whose mean is about 1
        scale = torch.rand(m, 11, device="cuda") * HIDDEN / 5
    if name.startswith("fp8"):
        rows = quantized(x.float(), Fp8Rows.empty(m, HIDDEN, x.device))
        rows = replace(rows, scale=scale[:, None])
        weight = random(2 * INNER, HIDDEN, std=10.0).clamp(-448, 448).to(E4M3)
        columns = (torch.rand(2 * INNER, device="cuda") + 0.5) / 1e5
        if name == "fp8-swiglu-fp8":
            out = poisoned(m + PADDING, INNER).to(E4M3)
            gemm.fp8_swiglu_fp8(rows, weight, 5 * columns, out[:m])  # numbers of 4 or so
            return [out]
        out = poisoned(m + PADDING, INNER if name == "fp8-swiglu" else 2 * INNER)
        (gemm.fp8_swiglu if name == "fp8-swiglu" else gemm.fp8)(rows, weight, columns, out[:m])
        return [out]
    if name in ("plain", "bias"):
        weight, out = random(HIDDEN, HIDDEN, std=0.05), poisoned(m + PADDING, HIDDEN)
        if name == "plain":
            gemm.plain(x, weight, out[:m])
        else:
            gemm.bias(x, weight, random(HIDDEN), out[:m])
        return [out]
    if name.endswith("swiglu"):
        weight, out = random(2 * INNER, HIDDEN, std=0.05), poisoned(m + PADDING, INNER)
        if name == "swiglu":
            gemm.swiglu(x, weight, out[:m])
        else:
            gemm.scaled_swiglu(x, weight, scale, out[:m])
        return [out]
    if name == "gelu":
        weight, out = random(4 * HIDDEN, HIDDEN, std=0.05), poisoned(m + PADDING, 4 * HIDDEN)
        gemm.gelu(x, weight, random(4 * HIDDEN), out[:m])
        return [out]
    if name.endswith("rope"):
        heads, out = rope(), poisoned(m + PADDING, QKV)
        weight = with_pairs_adjacent(random(QKV, HIDDEN, std=0.05), heads)
        angles = torch.rand(m, HEAD_DIM, device="cuda").half()
        scales = None if name == "unscaled-rope" else scale
        gemm.rope(x, weight, rope_columns(heads, BF16), scales, angles, out[:m])
        return [out]
    weight, out, residual = (
        random(HIDDEN, HIDDEN, std=0.05),
        poisoned(m + PADDING, HIDDEN),
        poisoned(m + PADDING, HIDDEN),
    )
    residual[:m] = random(m, HIDDEN)
    sums = poisoned(m * gemm.sum_parts(HIDDEN) + PADDING, dtype=torch.float32)
    gemm.residual(x, weight, residual[:m], random(HIDDEN), out[:m], sums)
    return [out, residual, sums]


def all_built() -> list[ProductKernel]:
    """Those of the build command, and any others of known names that the folders of kernels hold."""
    names = {record.kernel for record in KernelLibrary(default_folders(), (9, 0)).records}
    others = []
    for name in sorted(names):
        with suppress(ValueError):
            others.append(ProductKernel.parse(name))
    return list(dict.fromkeys([*DEFAULT_PRODUCTS, *others, RESIDUAL_PRODUCT]))


def allowed(kernel: ProductKernel, dtype: torch.dtype) -> tuple[float, float, float]:
    """How far a number may be off, relatively and absolutely, and all of them by their norm."""
    if dtype is E4M3:  # a hair may decide between two numbers, rarely; operands are five times as large
        return 2**-3, 10 * 2**-7, 0.02
    # Sums of FP8 products have fewer bits than fp32: of 12 million numbers the one furthest off shows it.
    return (2**-6, 2**-6, 0.004) if kernel.epilogue.startswith("fp8") else (2**-7, 2**-7, 0.004)


@pytest.mark.parametrize("m", [1, 129, 1000, 4096])
@pytest.mark.parametrize("kernel", all_built(), ids=lambda kernel: kernel.name)
def test_a_kernel_computes_what_its_plain_version_does(kernel: ProductKernel, m: int) -> None:
    gemm = loaded(kernel)
    torch.manual_seed(m + 1)  # the same numbers in any order of the tests
    x = random(m, HIDDEN)
    for actual, expected in zip(outputs_of(gemm, x, m), outputs_of(fake_gemm(kernel), x, m), strict=True):
        apart, least, most = allowed(kernel, actual.dtype)
        a, b = actual.float(), expected.float()
        torch.testing.assert_close(a, b, rtol=apart, atol=least, equal_nan=True)
        assert a.isnan().any()  # past M, in both
        assert (a - b).nan_to_num().norm() / b.nan_to_num().norm() < most


def layer_weights() -> LayerWeights:
    def norm() -> RmsNorm:
        return RmsNorm(random(HIDDEN), 1e-6)

    return LayerWeights(
        norm(), random(QKV, HIDDEN, std=0.03), rope(), random(HIDDEN, QUERY, std=0.03), norm(),
        random(2 * INNER, HIDDEN, std=0.03), random(HIDDEN, INNER, std=0.03),
    )  # fmt: skip


def buffers(m: int) -> DecoderBuffers:
    positions = torch.randint(0, 512, (m,), dtype=torch.int32, device="cuda")
    return DecoderBuffers(
        random(m, HIDDEN), poisoned(m, HIDDEN), positions, poisoned(m, QKV), random(m, QUERY),
        poisoned(m, 2 * INNER), poisoned(m, INNER), poisoned(1), poisoned(1),
    )  # fmt: skip


def plain_layer(weights: LayerWeights) -> DecoderLayer:
    return DecoderLayer(
        weights.input_norm, Projection(weights.qkv), weights.rope, Projection(weights.output),
        weights.mlp_norm, GatedProjection(weights.gate_up, lambda *_: None), Projection(weights.down),
    )  # fmt: skip


@pytest.mark.parametrize("m", [512, 4999])
@pytest.mark.parametrize(
    "way", [("residual", "scaled-swiglu", "rope"), ("residual", "rms-swiglu", "rms-rope")], ids="-".join
)
def test_steps_of_a_decoder_eagerly_and_in_a_graph(way: tuple[str, ...], m: int) -> None:
    weights = [layer_weights() for _ in range(4)]
    kernels = {kernel.epilogue: kernel for kernel in reversed(all_built())}
    if not kernels.keys() >= {*way}:
        pytest.skip("not built")
    rows, loads = buffers(m), {name: loaded(kernels[name]) for name in way}
    start = rows.residual.clone()
    fused = FusedDecoder(weights, m + 1, lambda epilogue, *_: loads.get(epilogue))

    def steps() -> None:
        fused.prepare(rows)
        for index in range(3):
            fused.step(index, rows)

    steps()
    eager = [rows.residual.clone(), rows.qkv.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    for _ in range(3):
        rows.residual.copy_(start)
        rows.qkv.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip([rows.residual, rows.qkv], eager, strict=True))
    rows.residual.copy_(start)
    layers = [plain_layer(layer) for layer in weights]
    for layer, following in pairwise(layers):
        add_rms_norm(layer.mix(rows), rows.residual, following.input_norm, rows.hidden)
        following.rotate(following.project(rows), rows)
    expected = with_pairs_adjacent(rows.qkv.T.contiguous(), weights[3].rope).T
    for actual, plain in ((eager[0], rows.residual), (eager[1], expected)):
        error = (actual.float() - plain.float()).norm() / plain.float().norm()
        assert error < 0.02


def test_projections_take_the_kernels_of_the_table() -> None:
    m, x = 4096, random(4096, HIDDEN)
    gate_up, bias = random(2 * INNER, HIDDEN, std=0.03), random(4 * HIDDEN)
    wide, fused, plain = poisoned(m, 2 * INNER), poisoned(m, INNER), poisoned(m, INNER)
    GatedProjection(gate_up)(x, wide, fused, poisoned(1))
    GatedProjection(gate_up, lambda *_: None)(x, wide, plain, poisoned(1))
    torch.testing.assert_close(fused, plain, rtol=2**-6, atol=2**-6)
    widen, wide, other = (
        random(4 * HIDDEN, HIDDEN, std=0.03),
        poisoned(m, 4 * HIDDEN),
        poisoned(m, 4 * HIDDEN),
    )
    BiasedProjection(widen, bias, True)(x, wide, poisoned(1))
    BiasedProjection(widen, bias, True, lambda *_: None)(x, other, poisoned(1))
    torch.testing.assert_close(wide, other, rtol=2**-6, atol=2**-6)


def test_row_scale() -> None:
    sums, out = torch.rand(1000, 8, device="cuda"), poisoned(1001, dtype=torch.float32)
    row_scale(sums, HIDDEN, 1e-6, out[:1000])
    torch.testing.assert_close(out[:1000], torch.rsqrt(sums.sum(1) / HIDDEN + 1e-6))
    assert out[1000].isnan()
