"""Fused steps of an encoder beside its plain layers and fp32: what they leave must be the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from rose.aot.products import Epilogue
from rose.attention.sdpa import SdpaAttention
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels.fused import FusedGemm, FusedLookup
from rose.kernels.norm import LayerNorm
from rose.layers import linear, projection
from rose.layers.encoder import DenseAddNorm, EncoderBuffers, EncoderLayer
from rose.layers.fused_encoder import Dense, FusedEncoder, LayerWeights
from rose.layers.projection import BiasedProjection
from rose.models import bert
from rose.weights import DummyWeights
from tests.unit.kernels.fused_fake import fake_lookup

TOKENS, HIDDEN, INNER, HEADS = 9, 192, 320, 3
WHOLE: tuple[Epilogue, ...] = ("ln-residual", "ln-gelu", "ln-bias")


def layer_weights() -> LayerWeights:
    def dense(n: int, k: int) -> Dense:
        return Dense(torch.randn(n, k) / k**0.5, torch.randn(n))

    def norm() -> LayerNorm:
        return LayerNorm(torch.rand(HIDDEN) + 0.5, torch.randn(HIDDEN), 1e-5)

    return LayerWeights(
        dense(3 * HIDDEN, HIDDEN), dense(HIDDEN, HIDDEN), norm(), dense(INNER, HIDDEN),
        dense(HIDDEN, INNER), norm(),
    )  # fmt: skip


def plain(weights: LayerWeights) -> EncoderLayer:
    def both(dense: Dense) -> tuple[Tensor, Tensor]:
        return dense.weight, dense.bias

    return EncoderLayer(
        BiasedProjection(*both(weights.qkv)), DenseAddNorm(*both(weights.output), weights.attention_norm),
        BiasedProjection(*both(weights.widen), gelu=True),
        DenseAddNorm(*both(weights.down), weights.output_norm), HEADS, HIDDEN // HEADS,
    )  # fmt: skip


def buffers(dtype: torch.dtype = torch.float32) -> EncoderBuffers:
    def rows(width: int) -> Tensor:
        return torch.full((TOKENS, width), torch.nan, dtype=dtype)

    return EncoderBuffers(
        torch.randn(TOKENS, HIDDEN).to(dtype), rows(HIDDEN), torch.randn(TOKENS, HIDDEN).to(dtype),
        rows(HIDDEN), rows(3 * HIDDEN), rows(INNER), torch.empty(0),
    )  # fmt: skip


def only(*epilogues: Epilogue) -> FusedLookup:
    def lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
        return fake_lookup(epilogue, m, n, k) if epilogue in epilogues else None

    return lookup


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@contextmanager
def kept() -> Iterator[None]:
    """Layers made inside keep their weights, as on a GPU."""
    with (
        patch.object(projection, "uses_table", lambda weight: True),
        patch.object(torch.Tensor, "is_cuda", True),
        patch.object(linear, "_prepack", lambda weight: None),
    ):
        yield


def contexts(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What stands for attention: the same whichever way came before."""
    return [torch.randn(TOKENS, HIDDEN).to(dtype) for _ in range(steps)]


def stepped(
    weights: list[LayerWeights], rows: EncoderBuffers, found: list[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """QKV after each step, and the last layer's input."""
    fused, qkv = FusedEncoder(weights, TOKENS + 4, only(*WHOLE)), []
    assert fused.takes(TOKENS) and rows.context is not None and rows.hidden is not None
    for index, context in enumerate(found):
        rows.context.copy_(context)
        qkv.append(fused.step(index, rows).clone())
    fused.finish(len(found), rows.hidden)
    return qkv, rows.hidden


def test_steps_are_what_the_plain_layers_do() -> None:
    weights, rows = [layer_weights() for _ in range(4)], buffers()
    assert rows.hidden is not None
    start, found = rows.hidden.clone(), contexts(3)
    fused_qkv, fused_hidden = stepped(weights, rows, found)
    hidden, layers = start, [plain(one) for one in weights]
    plain_rows = EncoderBuffers()
    for index, context in enumerate(found):
        hidden = layers[index].mix(context, hidden, plain_rows)
        qkv = layers[index + 1].qkv(hidden, None, None)
        torch.testing.assert_close(fused_qkv[index], qkv, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(fused_hidden, hidden, rtol=2e-4, atol=2e-4)


def in_fp32(weights: list[LayerWeights], hidden: Tensor, found: list[Tensor]) -> tuple[Tensor, Tensor]:
    def product(x: Tensor, dense: Dense) -> Tensor:
        return x @ dense.weight.float().T + dense.bias.float()

    def normed(x: Tensor, norm: LayerNorm) -> Tensor:
        return layer_norm(x, (HIDDEN,), norm.weight.float(), norm.bias.float(), norm.eps)

    for layer, context in zip(weights, found, strict=False):
        hidden = normed(hidden + product(context, layer.output), layer.attention_norm)
        wide = gelu(product(hidden, layer.widen))
        hidden = normed(hidden + product(wide, layer.down), layer.output_norm)
    return product(hidden, weights[len(found)].qkv), hidden


def halved(weights: LayerWeights) -> LayerWeights:
    """In bf16."""
    dtype = torch.bfloat16

    def dense(one: Dense) -> Dense:
        return Dense(one.weight.to(dtype), one.bias.to(dtype))

    def norm(one: LayerNorm) -> LayerNorm:
        return LayerNorm(one.weight.to(dtype), one.bias.to(dtype), one.eps)

    return LayerWeights(
        dense(weights.qkv), dense(weights.output), norm(weights.attention_norm), dense(weights.widen),
        dense(weights.down), norm(weights.output_norm),
    )  # fmt: skip


@pytest.mark.parametrize("mean", [0.0, 20.0])
def test_in_bf16_they_are_as_near_to_fp32_as_plain_layers(mean: float) -> None:
    """Also where rows are far from zero: what the weight makes of their mean cancels."""
    weights, rows = [halved(layer_weights()) for _ in range(4)], buffers(torch.bfloat16)
    weights = [replace(one, output=replace(one.output, bias=one.output.bias + mean)) for one in weights]
    assert rows.hidden is not None
    start, found = rows.hidden.clone(), contexts(3, torch.bfloat16)
    fused_qkv, fused_hidden = stepped(weights, rows, found)
    expected = in_fp32(weights, start.float(), [one.float() for one in found])
    hidden, layers = start.clone(), [plain(one) for one in weights]
    other = buffers(torch.bfloat16)
    for index, context in enumerate(found):
        hidden = layers[index].mix(context, hidden, other)
    ordinary = layers[3].qkv(hidden, None, None), hidden
    for actual, usual, right in zip((fused_qkv[-1], fused_hidden), ordinary, expected, strict=True):
        error, usual_error = ((one.float() - right).norm() / right.norm() for one in (actual, usual))
        assert error < 1.2 * usual_error


def test_rows_that_are_not_taken_are_refused() -> None:
    weights = [layer_weights() for _ in range(2)]
    for missing in WHOLE:
        fused = FusedEncoder(weights, TOKENS, only(*{*WHOLE} - {missing}))
        assert not fused.takes(TOKENS)
        with pytest.raises(ValueError, match="no fused kernels for 9 tokens"):
            fused.step(0, buffers())
    with pytest.raises(ValueError, match="need buffers"):
        FusedEncoder(weights, TOKENS, only(*WHOLE)).step(0, EncoderBuffers())


def test_layers_whose_weights_are_not_kept_are_left_alone() -> None:
    assert FusedEncoder.of([plain(layer_weights()) for _ in range(2)], TOKENS, only(*WHOLE)) is None


def test_there_is_no_second_weight_where_no_kernel_would_take_it() -> None:
    with kept():
        layers = [plain(layer_weights()) for _ in range(2)]
    assert FusedEncoder.of(layers, TOKENS, only(*WHOLE[:2])) is None
    found = FusedEncoder.of(layers, TOKENS, only(*WHOLE))
    assert found is not None and found.takes(TOKENS)
    assert not found.using(only()).takes(TOKENS)


CONFIG = ModelConfig(
    architecture="bert", task="embed", hidden_size=HIDDEN, num_layers=4, num_heads=HEADS, num_kv_heads=HEADS,
    head_dim=HIDDEN // HEADS, intermediate_size=INNER, vocab_size=50, max_positions=64, norm_eps=1e-5,
    max_model_len=64, type_vocab_size=1, pooling="cls",
)  # fmt: skip


class Spread(DummyWeights):
    """Weights at which attention and norms matter."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = super().tensor(name, shape)
        if "LayerNorm.weight" in name:
            return found * torch.linspace(0.5, 1.5, len(found))
        return found * (1 if "embed" in name else 5)


def model(layers: int = 4) -> bert.BertModel:
    """In buffers of its own, as on a GPU."""
    config = replace(CONFIG, num_layers=layers)
    with kept():
        found = bert.BertModel(config, Spread(), torch.float32, torch.device("cpu"), 32)
    found._on_cpu = False
    found._buffers = EncoderBuffers.allocate(config, 32, torch.float32, torch.device("cpu"))
    return found


def given(model: bert.BertModel, tokens: bool = False) -> list[Tensor]:
    """Vectors, and the hidden states of all tokens."""
    lengths = torch.tensor([0, 5, 6, 20], dtype=torch.int32)
    attention = SdpaAttention(model.attention_spec)
    attention.plan(lengths.numpy(), 20, 0)
    ids = torch.arange(20, dtype=torch.int32) * 7 % 50
    hidden = {"hidden": torch.full((20, HIDDEN), torch.nan)} if tokens else {}
    outputs = Outputs(torch.full((3, HIDDEN), torch.nan), None, hidden)
    with torch.inference_mode():
        model.forward(DeviceBatch(ids, lengths, None, lengths.numpy(), 14, attention), outputs)
    return [outputs.vectors, *hidden.values()]


@pytest.mark.parametrize("tokens", [False, True])
def test_a_model_takes_the_fused_way_where_it_can(monkeypatch: pytest.MonkeyPatch, tokens: bool) -> None:
    asked: list[Epilogue] = []
    steps: list[int] = []
    step = FusedEncoder.step

    def counted(self: FusedEncoder, index: int, rows: EncoderBuffers) -> Tensor:
        steps.append(index)
        return step(self, index, rows)

    def lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
        asked.append(epilogue)
        return only(*WHOLE)(epilogue, m, n, k)

    ordinary = given(model(), tokens)
    monkeypatch.setattr(bert, "fused_gemm", lookup)
    monkeypatch.setattr(FusedEncoder, "step", counted)
    fused = model()
    asked.clear()
    for _ in range(2):
        for actual, expected in zip(given(fused, tokens), ordinary, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert steps == [0, 1, 2] * 2  # the last layer ends as ever
    assert len(asked) == 4  # once a size of batch


def test_a_model_of_one_layer_has_nothing_to_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = given(model(layers=1))
    monkeypatch.setattr(bert, "fused_gemm", only(*WHOLE))
    assert torch.equal(given(model(layers=1))[0], ordinary[0])
