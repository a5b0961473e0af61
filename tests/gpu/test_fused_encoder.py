"""Whole encoder layers by products on the GPU: kernels against fp64, steps in graphs, forwards of BGE-M3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from rose.aot.folders import default_folders
from rose.aot.library import KernelLibrary
from rose.aot.products import Epilogue, ProductKernel
from rose.attention.backends import load_backends
from rose.config import load_config
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedGemm, NormColumns, load
from rose.kernels.norm import LayerNorm, layer_norm
from rose.kernels.row_norm import UnnormedRows, row_norm
from rose.layers.encoder import DenseAddNorm, EncoderBuffers, EncoderLayer
from rose.layers.fused_encoder import Dense, FusedEncoder, LayerWeights
from rose.layers.projection import BiasedProjection
from rose.models import bert
from rose.models.bert import BertModel
from rose.reference import reference_vectors
from rose.weights import DummyWeights
from tests.gpu.loaded_model import CopyAttention, LoadedModel, least_cosine, nothing_allocated

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16
PADDING = 7  # rows past M that must stay as they are
HIDDEN, INNER, HEADS = 1024, 4096, 16
WHOLE: tuple[Epilogue, ...] = ("ln-residual", "ln-gelu", "ln-bias")
SHAPES: dict[str, list[tuple[int, int]]] = {
    "ln-residual": [(HIDDEN, HIDDEN), (HIDDEN, INNER)],
    "ln-gelu": [(INNER, HIDDEN)],
    "ln-bias": [(3 * HIDDEN, HIDDEN)],
}
MAX_TOKENS = 4608


def built() -> list[ProductKernel]:
    names = {record.kernel for record in KernelLibrary(default_folders(), (9, 0)).records}
    return [ProductKernel.parse(name) for name in sorted(names) if name.startswith("gemm-ln-")]


def by_epilogue() -> dict[Epilogue, FusedGemm]:
    found: dict[Epilogue, FusedGemm] = {}
    for kernel in built():
        gemm = load(kernel)
        if gemm is not None:
            found.setdefault(kernel.epilogue, gemm)
    if not found.keys() >= {*WHOLE}:
        pytest.skip("not built")
    return found


def random(*shape: int, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(mean, std)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def near(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert float((actual.double() - expected.double()).norm() / expected.double().norm()) < limit


@pytest.mark.parametrize("m", [2048, 2560, 2564, 4096])
@pytest.mark.parametrize("kernel", built(), ids=lambda kernel: kernel.name)
def test_a_kernel_computes_layer_norm_and_product(kernel: ProductKernel, m: int) -> None:
    """Of rows far from zero, with what FusedEncoder makes of a norm's weight and bias; against fp64."""
    gemm = load(kernel)
    assert gemm is not None
    for n, k in SHAPES[kernel.epilogue]:
        width = n if kernel.epilogue == "ln-residual" else k
        values, norm_weight, norm_bias = random(m, width, mean=0.5), random(width, mean=1.0), random(width)
        weight, bias, out = random(n, k, std=0.05), random(n), poisoned(m + PADDING, n)
        scale, offset = torch.empty(2, m, device="cuda")
        row_norm(torch.stack([values.float(), values.float().square()]), width, 1e-5, scale, offset)
        normed = torch.nn.functional.layer_norm(
            values.double(), (width,), norm_weight.double(), norm_bias.double(), 1e-5
        )
        rows = UnnormedRows(values, scale, offset)
        if kernel.epilogue != "ln-residual":
            folded = (weight.float() * norm_weight.float()).to(BF16)
            shift = bias.float() + weight.float() @ norm_bias.float()
            gemm.norm(rows, folded, NormColumns(folded.sum(1, dtype=torch.float32), shift), out[:m])
            product = normed @ weight.double().T + bias.double()
            near(out[:m], gelu(product) if kernel.epilogue == "ln-gelu" else product, 0.004)
        else:
            x, parts = random(m, k), gemm.sum_parts(n)
            sums = poisoned(2 * m * parts + PADDING, dtype=torch.float32)
            columns = NormColumns(norm_weight.float(), bias.float() + norm_bias.float())
            found = gemm.norm_residual(x, weight, rows, columns, out[:m], sums)
            total = normed + x.double() @ weight.double().T + bias.double()
            near(out[:m], total, 0.003)
            torch.testing.assert_close(found[0].sum(1).double(), total.sum(1), rtol=1e-4, atol=1e-2)
            torch.testing.assert_close(found[1].sum(1).double(), total.square().sum(1), rtol=1e-4, atol=0.0)
            assert sums[2 * m * parts :].isnan().all()
        assert out[m:].isnan().all()
        assert not out[:m].isnan().any()


def test_row_norm_and_layer_norm() -> None:
    values = random(1000, HIDDEN, std=2.0, mean=1.0)
    norm = LayerNorm(random(HIDDEN, mean=1.0), random(HIDDEN), 1e-5)
    parts = values.float().view(1000, 8, -1)
    actual = poisoned(2, 1001, dtype=torch.float32)
    row_norm(torch.stack([parts.sum(2), parts.square().sum(2)]), HIDDEN, 1e-5, *actual[:, :1000])
    plain = torch.nn.functional.layer_norm(values.double(), (HIDDEN,), eps=1e-5)
    near(values.double() * actual[0, :1000, None] + actual[1, :1000, None], plain, 1e-5)
    assert actual[:, 1000].isnan().all()
    expected = plain * norm.weight.double() + norm.bias.double()
    layer_norm(values, norm, values)
    near(values, expected, 0.003)


def layer_weights() -> LayerWeights:
    def dense(n: int, k: int) -> Dense:
        return Dense(random(n, k, std=0.03), random(n, std=0.1))

    def norm() -> LayerNorm:
        return LayerNorm(random(HIDDEN, std=0.2, mean=1.0), random(HIDDEN, std=0.1), 1e-5)

    return LayerWeights(
        dense(3 * HIDDEN, HIDDEN), dense(HIDDEN, HIDDEN), norm(), dense(INNER, HIDDEN),
        dense(HIDDEN, INNER), norm(),
    )  # fmt: skip


def plain_layer(weights: LayerWeights) -> EncoderLayer:
    def both(dense: Dense) -> tuple[Tensor, Tensor]:
        return dense.weight, dense.bias

    return EncoderLayer(
        BiasedProjection(*both(weights.qkv), lookup=lambda *_: None),
        DenseAddNorm(*both(weights.output), weights.attention_norm, lambda *_: None),
        BiasedProjection(*both(weights.widen), gelu=True, lookup=lambda *_: None),
        DenseAddNorm(*both(weights.down), weights.output_norm, lambda *_: None), HEADS, HIDDEN // HEADS,
    )  # fmt: skip


def buffers(m: int) -> EncoderBuffers:
    return EncoderBuffers(
        random(m, HIDDEN), poisoned(m, HIDDEN), random(m, HIDDEN), poisoned(m, HIDDEN),
        poisoned(m, 3 * HIDDEN), poisoned(m, INNER), poisoned(8 * 1024 * INNER),
    )  # fmt: skip


@pytest.mark.parametrize("early", [*Early])
@pytest.mark.parametrize("m", [2048, 2561])
def test_steps_eagerly_and_in_a_graph(m: int, early: Early) -> None:
    weights, kernels = [layer_weights() for _ in range(4)], by_epilogue()
    fused = FusedEncoder(weights, m + 1, lambda epilogue, *_: kernels.get(epilogue))
    rows = buffers(m)
    assert rows.hidden is not None and rows.qkv is not None and rows.context is not None
    start = rows.hidden.clone()

    def steps() -> None:
        assert rows.hidden is not None
        with launching(early):
            for index in range(3):
                fused.step(index, rows)
            fused.finish(3, rows.hidden)

    steps()
    eager = [rows.hidden.clone(), rows.qkv.clone()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    for _ in range(3):
        rows.hidden.copy_(start)
        rows.qkv.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip([rows.hidden, rows.qkv], eager, strict=True))
    layers = [plain_layer(layer) for layer in weights]
    hidden = rows.hidden.copy_(start)
    for layer in layers[:3]:
        hidden = layer.mix(rows.context, hidden, rows)
    near(eager[0], hidden, 0.01)
    near(eager[1], layers[3].qkv(hidden, rows.qkv, rows.partials), 0.01)


def no_product(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
    return None


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LoadedModel, LoadedModel]]:
    """BGE-M3 with whole layers from 2048 rows on, and without."""
    kernels = by_epilogue()

    def lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
        return kernels.get(epilogue) if m >= 2048 else None

    config = load_config(ROOT / "rose" / "presets" / "bge-m3")
    weights, found = DummyWeights(1, "cuda"), []
    with pytest.MonkeyPatch.context() as patch:
        for chosen in (lookup, no_product):
            patch.setattr(bert, "fused_gemm", chosen)
            model = BertModel(config, weights, BF16, torch.device("cuda"), MAX_TOKENS)
            backends = load_backends(model.attention_spec, compile_missing=False)
            found.append(LoadedModel(model, weights, next(iter(backends.values()))))
    yield found[0], found[1]
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("lengths", "padded_to"), [([512] * 4, 2048), ([512] * 4 + [3], 2560), ([700, 1, 3395], 4096)]
)
def test_forwards_are_near_the_unfused_and_fp32(
    pair: tuple[LoadedModel, LoadedModel], lengths: list[int], padded_to: int
) -> None:
    fused, _ = pair
    assert isinstance(fused.model, BertModel) and fused.model._fused is not None
    assert fused.model._fused.takes(padded_to) and not fused.model._fused.takes(2047)
    sequences = fused.sequences(lengths)
    vectors, usual = (loaded.run(sequences, padded_to).vectors for loaded in pair)
    expected = reference_vectors(fused.config, fused.weights, sequences, device="cuda")
    assert least_cosine(vectors, usual) >= 0.9997
    assert least_cosine(vectors, expected) >= 0.999
    # No further from fp32 than the unfused way, but for chance.
    assert 1 - least_cosine(vectors, expected) < 2 * (1 - least_cosine(usual, expected)) + 1e-5


def test_token_outputs_are_of_normed_rows(pair: tuple[LoadedModel, LoadedModel]) -> None:
    sequences, found = pair[0].sequences([512] * 4), []
    for loaded in pair:
        hidden = torch.full((2048, HIDDEN), torch.nan, device="cuda")
        outputs = replace(loaded.outputs(5), tokens={"hidden": hidden})
        with torch.inference_mode():
            loaded.model.forward(loaded.batch(sequences, 2048), outputs)
        found.append(hidden)
    assert least_cosine(*found) >= 0.999


def test_early_launches_and_padding_change_no_bit(
    pair: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, _ = pair
    sequences = fused.sequences([700, 1338, 3])
    monkeypatch.setattr(bert, "early_for", lambda *batch: Early.NO)
    expected = fused.run(sequences, 2048).vectors
    assert torch.equal(fused.run(sequences, 2048, filler=777).vectors, expected)
    for early in (Early.AT_ONCE, Early.AFTER_WAIT):
        monkeypatch.setattr(bert, "early_for", lambda *batch, early=early: early)
        for _ in range(5):
            assert torch.equal(fused.run(sequences, 2048).vectors, expected)


def test_replays_with_other_tokens_and_offsets(pair: tuple[LoadedModel, LoadedModel]) -> None:
    fused, plain = pair
    for sequences, vectors in fused.replayed(2048, [(2048, 0, 0), (3, 1000, 7), (512, 512, 1024)]):
        assert least_cosine(vectors, plain.run(sequences, 2048).vectors) >= 0.9997


def test_a_forward_allocates_nothing(pair: tuple[LoadedModel, LoadedModel]) -> None:
    stub = replace(pair[0], attention=CopyAttention())
    batch, outputs = stub.batch(stub.sequences([2046]), 2048), stub.outputs(2)
    with torch.inference_mode():
        stub.model.forward(batch, outputs)
        with nothing_allocated():
            stub.model.forward(batch, outputs)
