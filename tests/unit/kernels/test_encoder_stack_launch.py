"""All layers of a BERT in one launch: what the driver is asked for, and which models are given to it."""

from __future__ import annotations

import ctypes
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as real

from rose.aot.gelu_polynomial import COEFFICIENTS, LARGEST_SQUARE
from rose.attention.base import AttentionSpec
from rose.kernels.cuda import encoder_stack as kernels_module
from rose.kernels.cuda import stack as stack_module
from rose.kernels.cuda.cubin import ENCODER_STACK, ENCODER_WIDE
from rose.kernels.cuda.encoder_stack import EncoderKernels, EncoderRows, EncoderStackArguments, EncoderWeights
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.norm import LayerNorm
from rose.layers.encoder import EncoderLayer
from rose.layers.encoder_stack import EncoderStack
from tests.unit.kernels.fake_driver import FakeDriver

BF16 = torch.bfloat16
SPEC = AttentionSpec(16, 16, 64, 0.125, False, BF16, torch.device("cpu"))
NUMBERS_A_LAYER = 8


def _read(parameters: int) -> tuple[EncoderStackArguments, list[int], list[int]]:
    """The structure behind four tensor maps, and counters and layers' addresses as they are at the launch."""
    pointers, kind = (ctypes.c_void_p * 5).from_address(parameters), EncoderStackArguments
    stack = kind.from_buffer_copy(ctypes.string_at(pointers[4], ctypes.sizeof(kind)))
    counters = (ctypes.c_int * (stack.num_layers * 256)).from_address(stack.counters)
    layers = (ctypes.c_int64 * (stack.num_layers * NUMBERS_A_LAYER)).from_address(stack.layers)
    return stack, list(counters), list(layers)


@pytest.fixture
def driver():
    return FakeDriver(_read)


@pytest.fixture
def library(driver):
    return CudaLibrary(Path("some.cubin"), 0, driver)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16)


def _weights() -> EncoderWeights:
    products = (_empty(3072, 1024), _empty(1024, 1024), _empty(4096, 1024), _empty(1024, 4096))
    return EncoderWeights(*products, _empty(3072), _empty(4096), *(_empty(1024) for _ in range(6)))


def _rows(num_tokens: int, num_seqs: int) -> EncoderRows:
    offsets = torch.zeros(num_seqs + 1, dtype=torch.int32)
    return EncoderRows(_empty(num_tokens, 1024), _empty(num_tokens, 1024), _empty(num_tokens, 4096), offsets)


@pytest.mark.parametrize(
    ("num_tokens", "tile", "heads", "wide"),
    [(1, 32, 32, 32), (32, 32, 32, 32), (33, 64, 32, 64), (65, 128, 64, 64), (128, 128, 64, 64)],
)
def test_a_launch_says_all_of_a_batch(num_tokens, tile, heads, wide, library, driver):
    layers, rows = [_weights(), _weights()], _rows(num_tokens, 3)
    kernels = EncoderKernels(library, layers, eps=1e-5, scale=0.125)
    kernels.launch(rows, 77)
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.block) == (f"encoder_stack_{tile}", (128, 1, 1), (320, 1, 1))
    assert (call.shared, call.stream, call.cooperative, call.count) == (227 * 1024, 77, 1, 1)
    seen, counters, _ = call.seen
    assert (seen.num_layers, seen.num_tokens, seen.num_seqs) == (2, num_tokens, 3)
    assert (seen.eps, seen.scale) == pytest.approx((1e-5, 0.125 / 0.6931472))
    assert counters == [0] * 2 * 4 * 8 * 8
    for name in EncoderRows.__slots__:
        assert getattr(seen, name) == getattr(rows, name).data_ptr()
    # Rows of a batch end where it does, so that the copy engine fills a tile with zeros. A map is made once.
    boxes = ((rows.hidden, heads), (rows.hidden, wide), (rows.context, tile), (rows.wide, tile))
    wanted = [
        (x.data_ptr(), [x.shape[1], num_tokens], [x.shape[1] * 2], [64, box], [1, 1]) for x, box in boxes
    ]
    assert driver.maps[8:] == [entry for i, entry in enumerate(wanted) if entry not in wanted[:i]]
    assert [entry[0] for entry in driver.maps[:8]] == [
        weight.data_ptr()
        for layer in layers
        for weight in (layer.qkv, layer.output, layer.wide, layer.narrow)
    ]


def test_a_layer_s_numbers_are_where_the_kernel_reads_them(library, driver):
    layers = [_weights(), _weights()]
    EncoderKernels(library, layers, eps=1, scale=1).launch(_rows(16, 1), 0)
    _, _, addresses = driver.launches[0].seen
    names = (
        "qkv_bias",
        "wide_bias",
        *("output_bias", "attended_norm", "attended_shift"),
        *("narrow_bias", "hidden_norm", "hidden_shift"),
    )
    assert len(names) == NUMBERS_A_LAYER
    assert addresses == [getattr(layer, name).data_ptr() for layer in layers for name in names]


def test_numbers_must_lie_where_eight_can_be_read_at_once(library):
    apart = replace(_weights(), wide_bias=_empty(4100)[4:])
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        EncoderKernels(library, [_weights(), apart], eps=1, scale=1)


def test_what_is_waited_for_is_nothing_before_a_launch(library, driver):
    kernels = EncoderKernels(library, [_weights()], eps=1, scale=1)
    memory = kernels.kernels.memory
    memory["counters"].fill_(5)
    kernels.launch(_rows(16, 1), 0)
    seen, counters, _ = driver.launches[0].seen
    assert counters == [0] * 4 * 8 * 8
    for name in ("qkv", "partials"):
        assert (memory[name] == -1).all()
        assert getattr(seen, name) == memory[name].data_ptr()
    assert memory["qkv"].nbytes == 2 * 128 * 3072 * 2  # two layers in turns
    assert memory["partials"].nbytes == 8 * 128 * 1024 * 2


def test_the_structure_and_the_numbers_are_the_source_s():
    """Fields in order, and constants that both sides must agree on."""
    files = ENCODER_STACK.path, ENCODER_STACK.path.with_name("encoder_layers.cuh")
    source = "".join(file.read_text("utf-8") for file in files)
    struct = re.search(r"struct Stack \{(.*?)\n\};", source, re.DOTALL).group(1)
    names = re.findall(r"\**(\w+)(?=[,;])", re.sub(r"//.*", "", struct))
    assert names == [name for name, _ in EncoderStackArguments._fields_]
    heads, most = kernels_module.HEADS, f"{LARGEST_SQUARE**0.5}f"
    for text in (
        f"using H = Heads<{heads}, {heads}, {kernels_module.HEAD_DIM}, false>;",
        f"kInner = {kernels_module.INNER};",
        "enum Part { kAttentionPart, kAttendedPart, kWidePart, kHiddenPart };",
        "enum Weight { kQkvWeight, kOutputWeight, kWideWeight, kNarrowWeight, kWeights };",
        "const __nv_bfloat16 *bias, *weight, *shift;",
        "const __nv_bfloat16 *qkv, *wide;\n    Sum attended, hidden;",
        *(f"kGelu{i} = {number}f" for i, number in enumerate(COEFFICIENTS)),
        f"near = fminf(fmaxf(x, -{most}), {most})",
        "kHeadTokens = kTokens > 32 ? kTokens / 2 : kTokens;",
        f"kWideTokens = kTokens == {kernels_module._SHARED_TILE} ? kTokens / 2 : kTokens;",
    ):
        assert text in source, text
    assert re.findall(r"^KERNEL\((\d+)\)", source, re.MULTILINE) == ["32", "64", "128"]


def _product(height: int, width: int, eps: float | None = None) -> SimpleNamespace:
    """A projection that keeps its weight; with eps, one with a norm behind it."""
    norm = None if eps is None else LayerNorm(_empty(height), _empty(height), eps)
    return SimpleNamespace(weight=_empty(height, width), bias=_empty(height), norm=norm)


def _layer(hidden: int = 1024, inner: int = 4096, eps: float = 1e-5) -> EncoderLayer:
    return EncoderLayer(
        qkv=_product(3 * hidden, hidden),
        attention_output=_product(hidden, hidden, 1e-5),
        widen=_product(inner, hidden),
        output=_product(hidden, inner, eps),
        num_heads=hidden // 64,
        head_dim=64,
    )


def test_layers_of_the_right_shape_are_taken(library, driver):
    layers = [_layer(), _layer()]
    stack = EncoderStack.of(layers, SPEC, {ENCODER_STACK: library}.get)
    assert stack is not None
    assert [stack.takes(rows) for rows in (1, 128, 129)] == [True, True, False]
    given = stack._kernels[0]._layers[1]
    last = layers[1]
    assert [getattr(given, field.name) for field in fields(given)] == [
        *(last.qkv.weight, last.attention_output.weight, last.widen.weight, last.output.weight),
        *(last.qkv.bias, last.widen.bias),
        *(last.attention_output.bias, last.attention_output.norm.weight, last.attention_output.norm.bias),
        *(last.output.bias, last.output.norm.weight, last.output.norm.bias),
    ]


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (_layer(hidden=768), replace(SPEC, num_heads=12, num_kv_heads=12)),
        (_layer(inner=3072), SPEC),
        (_layer(eps=1e-12), SPEC),
        (replace(_layer(), output=SimpleNamespace(weight=None, norm=_layer().output.norm)), SPEC),
        (_layer(), replace(SPEC, causal=True)),
        (_layer(), replace(SPEC, window=64)),
        (_layer(), replace(SPEC, dtype=torch.float16)),
        (_layer(), replace(SPEC, num_heads=8, num_kv_heads=8, head_dim=128)),
    ],
)
def test_other_layers_are_not(layer, spec, library):
    assert EncoderStack.of([_layer(), layer], spec, lambda source: library) is None


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_model_elsewhere_has_none_though_there_is_a_gpu(kind, library, monkeypatch):
    asked = []
    monkeypatch.setattr(stack_module, "stack_library", lambda source: asked.append(source) or library)
    assert EncoderStack.of([_layer()], replace(SPEC, device=torch.device(kind))) is None
    assert EncoderStack.of([_layer()], replace(SPEC, device=torch.device("cuda"))) is not None
    assert asked == [ENCODER_STACK, ENCODER_WIDE]


def test_without_the_kernel_there_is_no_stack(monkeypatch):
    monkeypatch.setattr(stack_module, "cuda_library", lambda source: None)
    assert EncoderStack.of([_layer()], replace(SPEC, device=torch.device("cuda"))) is None


def test_a_refused_launch_raises(library, driver):
    driver.launch_result = real.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    kernels = EncoderKernels(library, [_weights()], eps=1, scale=1)
    with pytest.raises(Exception, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        kernels.launch(_rows(16, 1), 0)
