"""The fused step beside the plain steps of the same layers: what they leave must be the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rose.aot.products import ROTARY_PRODUCT, UNSCALED_ROTARY_PRODUCT, Epilogue
from rose.attention.sdpa import SdpaAttention
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.kernels.cuda.rotary_product import ANGLE_ORDER
from rose.kernels.fused import ADJACENT, FusedGemm, FusedLookup
from rose.kernels.norm import RmsNorm, add_rms_norm
from rose.kernels.rope import QkRope, rope_table
from rose.layers import projection, token_qkv
from rose.layers.decoder import DecoderLayer
from rose.layers.fused_decoder import (
    FusedDecoder,
    LayerWeights,
    angle_table,
    with_pairs_adjacent,
)
from rose.layers.projection import GatedProjection, Projection
from rose.layers.workspace import DecoderBuffers
from rose.models import qwen3
from rose.weights import DummyWeights
from tests.unit.kernels.fused_fake import PROCESSORS, fake_lookup

TOKENS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 9, 64, 96, 4, 2, 128
QUERY, QKV = HEADS * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM


def layer_weights() -> LayerWeights:
    def weight(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k) / k**0.5

    def norm() -> RmsNorm:
        return RmsNorm(torch.rand(HIDDEN) + 0.5, 1e-6)

    table = rope_table(HEAD_DIM, 1e4, 64, "cpu")
    rope = QkRope(HEADS, KV_HEADS, HEAD_DIM, 1e-6, torch.rand(2, HEAD_DIM) + 0.5, table)
    return LayerWeights(
        norm(), weight(QKV, HIDDEN), rope, weight(HIDDEN, QUERY), norm(),
        weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER),
    )  # fmt: skip


def plain(weights: LayerWeights) -> DecoderLayer:
    return DecoderLayer(
        weights.input_norm, Projection(weights.qkv), weights.rope, Projection(weights.output),
        weights.mlp_norm, GatedProjection(weights.gate_up), Projection(weights.down),
    )  # fmt: skip


def buffers() -> DecoderBuffers:
    return DecoderBuffers(
        residual=torch.randn(TOKENS, HIDDEN), hidden=torch.full((TOKENS, HIDDEN), torch.nan),
        positions=torch.randint(0, 64, (TOKENS,), dtype=torch.int32),
        qkv=torch.full((TOKENS, QKV), torch.nan),
        context=torch.randn(TOKENS, QUERY), wide=torch.empty(TOKENS, 2 * INNER),
        narrow=torch.full((TOKENS, INNER), torch.nan), partials=torch.empty(0),
        scratch=torch.empty(0),
    )  # fmt: skip


WHOLE_BY_FACTORS: tuple[Epilogue, ...] = ("residual", "scaled-swiglu", "rope")
WHOLE_BY_SUMS: tuple[Epilogue, ...] = ("residual", "rms-swiglu", "rms-rope")


def only(*epilogues: Epilogue) -> FusedLookup:
    def lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
        return fake_lookup(epilogue, m, n, k) if epilogue in epilogues else None

    return lookup


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("kernels", [WHOLE_BY_FACTORS, WHOLE_BY_SUMS, ("unscaled-rope",)], ids="-".join)
def test_a_step_is_what_the_plain_layers_do_but_for_the_order_of_columns(
    kernels: tuple[Epilogue, ...],
) -> None:
    weights, rows = [layer_weights() for _ in range(3)], buffers()
    residual, context = rows.residual.clone(), rows.context
    fused = FusedDecoder(weights, TOKENS + 4, only(*kernels))
    fused.prepare(rows)
    if fused.takes(TOKENS):
        fused.step(1, rows)
    else:
        assert fused.takes_heads(TOKENS)
        fused.follow(1, plain(weights[1]).mix(rows), rows)
    fused_qkv, fused_residual = rows.qkv.clone(), rows.residual.clone()

    rows.residual.copy_(residual)
    assert rows.context is context
    layer, following = plain(weights[1]), plain(weights[2])
    add_rms_norm(layer.mix(rows), rows.residual, following.input_norm, rows.hidden)
    following.rotate(following.project(rows), rows)
    torch.testing.assert_close(fused_residual, rows.residual, rtol=1e-4, atol=1e-4)
    expected = with_pairs_adjacent(rows.qkv.T.contiguous(), weights[2].rope).T
    # The angles are fp16: off by half a thousandth.
    torch.testing.assert_close(fused_qkv, expected, rtol=2e-3, atol=2e-3)
    values = (HEADS + KV_HEADS) * HEAD_DIM
    torch.testing.assert_close(fused_qkv[:, values:], rows.qkv[:, values:], rtol=1e-4, atol=1e-4)


def test_the_first_layer_has_its_heads_rotated_by_the_product_too() -> None:
    weights, rows = [layer_weights() for _ in range(2)], buffers()
    rows.hidden.normal_()
    fused, first = FusedDecoder(weights, TOKENS + 4, only("unscaled-rope")), plain(weights[0])
    assert fused.begin(rows)
    fused_qkv = rows.qkv.clone()
    first.rotate(first.project(rows), rows)
    expected = with_pairs_adjacent(rows.qkv.T.contiguous(), weights[0].rope).T
    torch.testing.assert_close(fused_qkv, expected, rtol=2e-3, atol=2e-3)
    assert not fused.using(only(*WHOLE_BY_FACTORS)).begin(rows)


@pytest.mark.parametrize("order", [ADJACENT, ANGLE_ORDER], ids=["adjacent", "own"])
def test_angles_lie_in_the_order_that_is_asked_for(order: Sequence[int]) -> None:
    rope = layer_weights().rope
    table = angle_table(rope, order).view(64, -1, 2)
    assert sorted(order) == [*ADJACENT] and table.dtype is torch.float16
    for place, pair in enumerate(order):
        expected = rope.cos_sin[:, [pair, HEAD_DIM // 2 + pair]].half()
        assert torch.equal(table[:, place], expected)


@pytest.mark.parametrize("own", [(), ("unscaled-rope",), ("rope",), ("rope", "unscaled-rope")], ids=str)
def test_a_first_product_that_reads_angles_in_another_order_is_left_out(own: tuple[Epilogue, ...]) -> None:
    """Than all others, whose order the angles are in. own: heads that are rotated by kernels of our own."""
    kernels = {"rope": ROTARY_PRODUCT, "unscaled-rope": UNSCALED_ROTARY_PRODUCT}
    calls: list[tuple[object, ...]] = []

    def lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
        if epilogue in own:
            return FusedGemm(kernels[epilogue], lambda *arguments: calls.append(arguments), PROCESSORS)
        return only(*WHOLE_BY_FACTORS, "unscaled-rope")(epilogue, m, n, k)

    weights, rows = [layer_weights() for _ in range(2)], buffers()
    rows.hidden.normal_()
    fused = FusedDecoder(weights, TOKENS + 4, lookup)
    assert fused.takes(TOKENS) and fused.begin(rows) == (len(own) in (0, 2))
    assert len(calls) == (len(own) == 2)
    expected = angle_table(weights[0].rope, ANGLE_ORDER if "rope" in own else ADJACENT)
    assert torch.equal(fused._angles[:TOKENS], expected[rows.positions])


def test_attention_does_not_see_the_order_of_columns() -> None:
    rope = layer_weights().rope
    rows = torch.randn(QKV, 5)
    for source in (rows, with_pairs_adjacent(rows, rope)):
        q = source[: HEADS * HEAD_DIM].view(HEADS, HEAD_DIM, 5)
        k = source[HEADS * HEAD_DIM :][: KV_HEADS * HEAD_DIM].view(KV_HEADS, HEAD_DIM, 5)
        scores = torch.einsum("hdi,hdj->hij", q, k.repeat_interleave(HEADS // KV_HEADS, dim=0))
        if source is rows:
            expected = scores
    torch.testing.assert_close(scores, expected)


def test_rows_that_are_not_taken_are_refused() -> None:
    weights = [layer_weights() for _ in range(2)]
    for way in (WHOLE_BY_FACTORS, WHOLE_BY_SUMS):
        for missing in way:
            fused = FusedDecoder(weights, TOKENS, only(*{*way} - {missing}))
            assert not fused.takes(TOKENS) and not fused.takes_heads(TOKENS)
            with pytest.raises(ValueError, match="no fused kernels for 9 tokens"):
                fused.step(0, rows := buffers())
            with pytest.raises(ValueError, match="no fused kernel for the heads of 9 tokens"):
                fused.follow(0, rows.hidden, rows)


def test_sums_are_left_to_the_kernels_only_where_those_add_the_right_epsilon() -> None:
    first, last = (layer_weights() for _ in range(2))
    other = replace(first, mlp_norm=replace(first.mlp_norm, eps=1e-5))
    both = only(*WHOLE_BY_FACTORS, *WHOLE_BY_SUMS)
    assert FusedDecoder([other, last], TOKENS, both).takes(TOKENS)
    assert not FusedDecoder([other, last], TOKENS, only(*WHOLE_BY_SUMS)).takes(TOKENS)


def test_layers_on_a_cpu_are_left_alone() -> None:
    layers = [plain(layer_weights()) for _ in range(2)]
    assert FusedDecoder.of(layers, TOKENS, fake_lookup) is None


CONFIG = ModelConfig(
    architecture="qwen3", task="embed", hidden_size=HIDDEN, num_layers=3, num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM, intermediate_size=INNER, vocab_size=50, max_positions=64, norm_eps=1e-6,
    max_model_len=64, pooling="mean", quantizer=None, causal=False, rope_theta=1e4,
)  # fmt: skip


class Spread(DummyWeights):
    """Weights at which attention and norms matter: fifteen times as large, norms between 0.5 and 1.5."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = super().tensor(name, shape)
        if "norm" in name:
            return found * torch.linspace(0.5, 1.5, len(found))
        return found * (1 if "embed" in name else 7)


def vectors(model: qwen3.Qwen3Model) -> torch.Tensor:
    lengths = torch.tensor([0, 5, 6, 20], dtype=torch.int32)
    attention = SdpaAttention(model.attention_spec)
    attention.plan(lengths.numpy())
    ids = torch.arange(20, dtype=torch.int32) * 7 % 50
    outputs = Outputs(torch.full((3, HIDDEN), torch.nan), None)
    with torch.inference_mode():
        model.forward(DeviceBatch(ids, lengths, None, lengths.numpy(), 14, attention), outputs)
    return outputs.vectors


@pytest.mark.parametrize("kernels", [WHOLE_BY_FACTORS, WHOLE_BY_SUMS], ids="-".join)
def test_a_model_takes_the_fused_way_where_it_can(
    monkeypatch: pytest.MonkeyPatch, kernels: tuple[Epilogue, ...]
) -> None:
    def model() -> qwen3.Qwen3Model:
        return qwen3.Qwen3Model(CONFIG, Spread(), torch.float32, torch.device("cpu"), 32)

    asked: list[Epilogue] = []
    steps: list[int] = []
    step = FusedDecoder.step

    def counted(self: FusedDecoder, index: int, rows: DecoderBuffers) -> None:
        steps.append(index)
        step(self, index, rows)

    def lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
        asked.append(epilogue)
        return only(*kernels)(epilogue, m, n, k)

    plain = vectors(model())
    monkeypatch.setattr(projection, "uses_table", lambda weight: True)  # as on a GPU: weights are kept
    monkeypatch.setattr(qwen3, "fused_gemm", lookup)
    monkeypatch.setattr(FusedDecoder, "step", counted)
    fused = model()
    asked.clear()
    torch.testing.assert_close(vectors(fused), plain, rtol=2e-3, atol=2e-3)
    assert steps == [0, 1]  # the last layer ends as ever
    questions = len(asked)
    vectors(fused)
    assert steps == [0, 1] * 2
    assert len(asked) == questions  # asked once a size of batch
    monkeypatch.setattr(qwen3, "fused_gemm", only(*kernels[:2]))
    torch.testing.assert_close(vectors(model()), plain, rtol=0, atol=0)


def test_a_model_has_its_heads_rotated_by_the_product_where_only_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model() -> qwen3.Qwen3Model:
        return qwen3.Qwen3Model(CONFIG, Spread(), torch.float32, torch.device("cpu"), 32)

    followed: list[int] = []
    follow = FusedDecoder.follow

    def counted(self: FusedDecoder, index: int, mixed: torch.Tensor, rows: DecoderBuffers) -> None:
        followed.append(index)
        follow(self, index, mixed, rows)

    plain = vectors(model())
    monkeypatch.setattr(projection, "uses_table", lambda weight: True)
    monkeypatch.setattr(qwen3, "fused_gemm", only("unscaled-rope"))
    monkeypatch.setattr(FusedDecoder, "follow", counted)
    torch.testing.assert_close(vectors(model()), plain, rtol=2e-3, atol=2e-3)
    assert followed == [0, 1]


@pytest.mark.parametrize("kernels", [WHOLE_BY_SUMS, ("unscaled-rope",)], ids="-".join)
def test_behind_a_table_the_products_rotate_by_this_batch_s_positions(
    monkeypatch: pytest.MonkeyPatch, kernels: tuple[Epilogue, ...]
) -> None:
    def model() -> qwen3.Qwen3Model:
        return qwen3.Qwen3Model(CONFIG, Spread(), torch.float32, torch.device("cpu"), 32)

    plain = vectors(model())
    monkeypatch.setattr(projection, "uses_table", lambda weight: True)
    monkeypatch.setattr(token_qkv, "_has_room", lambda embeddings, width: True)
    monkeypatch.setattr(qwen3, "fused_gemm", only(*kernels))
    behind = model()
    assert behind._first_qkv is not None and behind._fused is not None
    behind._fused._angles.fill_(torch.nan)
    torch.testing.assert_close(vectors(behind), plain, rtol=2e-3, atol=2e-3)
    positions = torch.tensor([*range(5), 0, *range(14)])
    expected = angle_table(behind._first_qkv.rope, ADJACENT)[positions]
    assert torch.equal(behind._fused._angles[:20], expected)


def test_heads_that_the_kernel_was_not_compiled_for_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "uses_table", lambda weight: True)
    weights = layer_weights()
    assert FusedDecoder.of([plain(weights)] * 2, TOKENS, fake_lookup) is not None
    for change in ({"eps": 1e-5}, {"weight": None}, {"bias": torch.zeros(QKV)}):
        other = replace(weights, rope=replace(weights.rope, **change))
        assert FusedDecoder.of([plain(weights), plain(other)], TOKENS, fake_lookup) is None
