"""Models with FP8 products on a CPU: near to fp32, and wired as the plain ones are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rose.config import ModelConfig
from rose.errors import ModelLoadError
from rose.kernels import fp8 as kernels
from rose.kernels.fp8 import E4M3
from rose.layers import fp8_linear
from rose.layers.fp8_weights import DequantizedWeights, Fp8Weights
from rose.models.registry import build_model
from rose.reference import reference_vectors
from rose.weights import MappedWeights, WeightSource, dummy_weights
from tests.unit.attention.fp8_fake import Fp8Sdpa
from tests.unit.kernels.fused_fake import fake_lookup
from tests.unit.rose.bert_cases import CPU, least_cosine, random_sequences, run
from tests.unit.rose.test_padding import small

LENGTHS = (9, 1, 7, 30, 9)

CASES = {
    "mean": small("pplx-embed"),
    "last": small("qwen3-embedding"),
    "biased qkv": replace(small("qwen3-embedding"), architecture="qwen2", attention_bias=True),
    "cls": small("bge-m3"),
    "types": small("minilm"),
}


def fp8(config: ModelConfig, weights: WeightSource, dtype: torch.dtype = torch.float32):
    return build_model(config, Fp8Weights(weights, CPU, 128), dtype, CPU, 128)


class Uneven(MappedWeights):
    """Matrices of a size at which layers change what they are given, biases and norms that matter."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__({}, "memory")
        self._dummy = dummy_weights(config, 1)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Of one dimension: norms and biases."""
        tensor = self._dummy.tensor(name, shape)
        if len(shape) == 2:
            return 3.0 * tensor
        noise = self._dummy.tensor(f"{name}, noise", shape)  # a name that ends as a norm's does gives ones
        return tensor + 10.0 * noise


@pytest.mark.parametrize("case", CASES)
def test_wired_as_plain_layers_are(case, monkeypatch):
    """With fp32 in the place of e4m3 nothing is lost, so that any other difference shows."""
    for module in (kernels, fp8_linear):
        monkeypatch.setattr(module, "E4M3", torch.float32)
    config = CASES[case]
    weights, sequences = Uneven(config), random_sequences(config, LENGTHS)
    vectors = run(fp8(config, weights), sequences).vectors
    expected = reference_vectors(config, weights, sequences)
    assert least_cosine(vectors, expected) >= 0.99999
    torch.testing.assert_close(vectors, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_near_fp32(case, dtype):
    config = CASES[case]
    weights, sequences = dummy_weights(config, 1), random_sequences(config, LENGTHS)
    vectors = run(fp8(config, weights, dtype), sequences).vectors
    plain = run(build_model(config, weights, torch.float32, CPU, 128), sequences).vectors
    assert 0.99 <= least_cosine(vectors, plain) < 0.999999


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_does_not_depend_on_its_batch(case):
    config = CASES[case]
    model, sequences = fp8(config, Uneven(config)), random_sequences(config, LENGTHS)
    together = run(model, sequences).vectors
    alone = torch.cat([run(model, [sequence]).vectors for sequence in sequences])
    assert least_cosine(together, alone) >= 0.9999


@pytest.mark.parametrize("case", ["mean", "last"])
def test_attention_in_fp8_is_near_fp32_and_of_a_sequence_alone(case):
    config = CASES[case]
    weights, sequences = dummy_weights(config, 1), random_sequences(config, LENGTHS)
    model = fp8(config, weights)
    assert model.attention_spec.fp8
    attention = Fp8Sdpa(model.attention_spec)
    vectors = run(model, sequences, attention=attention).vectors
    assert attention.calls == config.num_layers - (
        case == "last"
    )  # whose last layer has one query a sequence
    assert 0.98 <= least_cosine(vectors, reference_vectors(config, weights, sequences)) < 0.999999
    assert least_cosine(vectors, run(model, sequences).vectors) < 0.999999
    alone = torch.cat([run(model, [sequence], attention=attention).vectors for sequence in sequences])
    assert least_cosine(vectors, alone) >= 0.9999


@pytest.mark.parametrize("case", ["mean", "last"])
def test_attention_in_fp8_is_wired_as_the_plain_one(case, monkeypatch):
    """With fp32 in the place of e4m3 nothing is lost; scales of heads that differ by layer and kind show."""
    for module in (kernels, fp8_linear):
        monkeypatch.setattr(module, "E4M3", torch.float32)
    config = CASES[case]
    weights, sequences = Uneven(config), random_sequences(config, LENGTHS)
    model = fp8(config, weights)
    vectors = run(model, sequences, attention=Fp8Sdpa(model.attention_spec)).vectors
    expected = reference_vectors(config, weights, sequences)
    assert least_cosine(vectors, expected) >= 0.99999


def test_without_norms_of_heads_attention_is_never_in_fp8():
    config = CASES["biased qkv"]
    model = fp8(config, dummy_weights(config, 1))
    assert not model.attention_spec.fp8
    attention = Fp8Sdpa(model.attention_spec)
    run(model, random_sequences(config, LENGTHS), attention=attention)
    assert attention.calls == 0


class Stored:
    """Products as a converted folder has them."""

    def __init__(self, plain: WeightSource, factor: float = 1.0) -> None:
        self._plain, self._factor = plain, factor

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = name.removesuffix("_scale")
        if "proj.weight" not in name:
            return self._plain.tensor(name, shape)
        tensor = self._plain.tensor(weight, (shape[0], 64 if "down" not in name else 96))
        scale = tensor.abs().amax(1, keepdim=True) / 448
        return (self._factor * scale).bfloat16() if name != weight else (tensor / scale).to(E4M3)


def test_stored_fp8_is_taken_as_it_is():
    config = small("pplx-embed")
    weights, sequences = dummy_weights(config, 1), random_sequences(config, LENGTHS)
    kept = run(fp8(config, Stored(weights)), sequences).vectors
    assert least_cosine(kept, run(fp8(config, weights), sequences).vectors) >= 0.995  # scales are bf16
    scaled_up = run(fp8(config, Stored(weights, 3.0)), sequences).vectors
    assert least_cosine(kept, scaled_up) < 0.99
    dequantized = reference_vectors(config, DequantizedWeights(Stored(weights)), sequences)
    assert least_cosine(kept, dequantized) >= 0.99


def test_heads_stored_in_fp8_are_multiplied_out():
    stored = {
        "dense.weight": torch.full((2, 3), 2.0).to(E4M3),
        "dense.weight_scale": torch.tensor([[0.5], [4.0]]),
    }
    tensor = Fp8Weights(MappedWeights(stored, "here"), CPU, 16).tensor("dense.weight", (2, 3))
    assert tensor.tolist() == [[1.0] * 3, [8.0] * 3]


def test_stored_fp8_without_scales_is_refused():
    weights = Fp8Weights(MappedWeights({"x.weight": torch.zeros(16, 16).to(E4M3)}, "here"), CPU, 16)
    with pytest.raises(ModelLoadError, match=r"here: tensor 'x\.weight_scale' is missing"):
        weights.linear({"x": 16}, 16)


def test_widths_that_products_cannot_have_are_refused():
    config = replace(small("minilm"), intermediate_size=92)
    with pytest.raises(ModelLoadError, match=r"intermediate\.dense has a width of 92, .* multiple of 16"):
        fp8(config, Uneven(config))


def test_non_finite_weights_show():
    config = small("pplx-embed")
    plain = Uneven(config)

    class Broken(MappedWeights):
        def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            tensor = plain.tensor(name, shape)
            if "layers.3.mlp.down" in name:
                tensor[5, 5] = float("inf")
            return tensor

    vectors = run(fp8(config, Broken({}, "memory")), random_sequences(config, LENGTHS)).vectors
    assert vectors.isnan().any(1).all()


def test_scratch_is_bounded():
    scratch = Fp8Weights(MappedWeights({}, "memory"), CPU, 16).scratch(64)
    with pytest.raises(ValueError, match="17 tokens; the scratch holds 16"):
        scratch.rows(17, 64)


def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """SwiGLU's kernel stores FP8, and no other is built."""

    def lookup(epilogue, m, n, k):
        return fake_lookup(epilogue, m, n, k) if epilogue == "fp8-swiglu-fp8" else None

    plain = fp8_linear.Fp8Gated.__init__
    monkeypatch.setattr(
        fp8_linear.Fp8Gated, "__init__", lambda self, linear: plain(self, linear, lookup)
    )  # fmt: skip


@pytest.mark.parametrize("case", ["mean", "last", "biased qkv"])
def test_swiglu_may_be_stored_in_fp8(case, monkeypatch):
    """Wired as the rest; and in e4m3 as near to fp32 as by way of bf16."""
    config = CASES[case]
    sequences = random_sequences(config, LENGTHS)
    weights, plain = Uneven(config), dummy_weights(config, 1)
    exact = reference_vectors(config, plain, sequences)
    by_bf16 = least_cosine(run(fp8(config, plain), sequences).vectors, exact)
    direct(monkeypatch)
    model = fp8(config, plain)
    found = run(model, sequences).vectors
    assert 1 - least_cosine(found, exact) < 1.5 * (1 - by_bf16)
    alone = torch.cat([run(model, [sequence]).vectors for sequence in sequences])
    assert least_cosine(found, alone) >= 0.9999
    for module in (kernels, fp8_linear):
        monkeypatch.setattr(module, "E4M3", torch.float32)
    vectors = run(fp8(config, weights), sequences).vectors
    assert least_cosine(vectors, reference_vectors(config, weights, sequences)) >= 0.99999


@pytest.mark.parametrize("decades", [0.0, 2.0, 5.0])
def test_no_row_is_more_than_swiglu_in_fp8_holds(decades):
    """Rows aimed at each column of gate and up in turn; the stand-in for the kernel asserts that all fits."""
    torch.manual_seed(int(decades))
    n, k = 64, 48

    def spread(*shape):
        return torch.randn(shape) * 10 ** (decades * (torch.rand(shape) - 0.5))

    both = spread(n // 2, k)  # gate and up alike, so that a row may be aimed at both
    weight = kernels.quantized(torch.cat([both, both]), kernels.Fp8Rows.empty(n, k, CPU))
    layer = fp8_linear.Fp8Gated(fp8_linear.Fp8Linear(weight), fake_lookup)
    rows = torch.cat([weight.float(), spread(64, k)]) * 100 * spread(n + 64, 1).abs()
    x = kernels.scaled(rows, rows.norm(dim=1, keepdim=True), kernels.Fp8Rows.empty(n + 64, k, CPU))
    out = kernels.Fp8Rows.empty(n + 64, n // 2, CPU)
    out.scale.copy_(x.scale**2 * layer.factor)
    fused = layer.storing_fp8(n + 64)
    assert fused is not None and layer.direct(x, fused, out) is out
    assert out.values.float().amax() > 380  # nor much less
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.float(), expected, rtol=2.0**-4, atol=float(out.scale.max()) * 2.0**-9)


@pytest.mark.parametrize("gated", [True, False])
def test_kernels_built_ahead_give_the_same(gated):
    """For other scales in every row, so that none is taken for another."""
    n, k, rows = 64, 32, 5
    scale = torch.rand(n, 1) + 0.5
    weight = kernels.Fp8Rows(torch.randn(n, k).to(E4M3), scale)
    x = kernels.Fp8Rows(torch.randn(rows, k).to(E4M3), torch.rand(rows, 1) + 0.5)
    found = []
    for lookup in (fake_lookup, lambda *key: None):
        linear = fp8_linear.Fp8Linear(weight, lookup=lookup)
        if gated:
            layer, out = fp8_linear.Fp8Gated(linear, lookup), kernels.Fp8Rows.empty(rows, n // 2, CPU)
            found.append(layer(x, torch.zeros(rows, n), torch.zeros(rows, n // 2), out).float())
        else:
            found.append(linear(x, torch.zeros(rows, n)))
    torch.testing.assert_close(*found, rtol=2.0**-3 if gated else 1e-5, atol=1e-2 if gated else 1e-5)
