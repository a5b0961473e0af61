"""All layers of a Qwen3 in one launch: what the driver is asked for, and which models are given to it."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as real

from rose.attention.base import AttentionSpec
from rose.kernels.cuda import decoder_stack as kernels_module
from rose.kernels.cuda import stack as stack_module
from rose.kernels.cuda.cubin import DECODER_STACK
from rose.kernels.cuda.decoder_stack import DecoderKernels, DecoderRows, DecoderStackArguments, DecoderWeights
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.plan import SHARED_BYTES
from rose.kernels.cuda.stack import NARROW
from rose.kernels.cuda.views import half_head_view
from rose.kernels.norm import RmsNorm
from rose.kernels.rope import QkRope
from rose.layers.decoder import DecoderLayer
from rose.layers.decoder_stack import DecoderStack
from tests.unit.kernels.fake_driver import FakeDriver

BF16 = torch.bfloat16
SPEC = AttentionSpec(16, 8, 128, 128**-0.5, True, BF16, torch.device("cpu"))
FOLDER = DECODER_STACK.path.parent


def _read(parameters: int) -> tuple[DecoderStackArguments, list[int]]:
    """The structure behind four tensor maps, and the counters as they are at the launch."""
    pointers = (ctypes.c_void_p * 5).from_address(parameters)
    kind = DecoderStackArguments
    stack = kind.from_buffer_copy(ctypes.string_at(pointers[4], ctypes.sizeof(kind)))
    return stack, list((ctypes.c_int * (stack.num_layers * 256)).from_address(stack.counters))


@pytest.fixture
def driver():
    return FakeDriver(_read)


@pytest.fixture
def library(driver):
    return CudaLibrary(Path("some.cubin"), 0, driver)


def _layer() -> DecoderWeights:
    shapes = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (2, 128), (1024,), (1024,))
    return DecoderWeights(*(torch.empty(shape, dtype=BF16) for shape in shapes))


def _rows(num_tokens: int, num_seqs: int) -> DecoderRows:
    widths = {"residual": 1024, "hidden": 1024, "context": 2048, "narrow": 3072}
    tensors = {name: torch.empty(num_tokens, width, dtype=BF16) for name, width in widths.items()}
    places = torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(num_seqs + 1, dtype=torch.int32)
    return DecoderRows(**tensors, positions=places[0], offsets=places[1])


@pytest.mark.parametrize(
    ("num_tokens", "tile", "few"), [(1, 32, 32), (32, 32, 32), (33, 64, 32), (65, 128, 64), (128, 128, 64)]
)
def test_a_launch_says_all_of_a_batch(num_tokens, tile, few, library, driver):
    layers, rows = [_layer(), _layer()], _rows(num_tokens, 3)
    kernels = DecoderKernels(library, layers, torch.zeros(9, 128), eps=1e-6, scale=0.5, causal=True)
    kernels.launch(rows, 77)
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.block) == (f"decoder_stack_{tile}", (128, 1, 1), (320, 1, 1))
    assert (call.shared, call.stream, call.cooperative, call.count) == (227 * 1024, 77, 1, 1)
    seen, _ = call.seen
    assert (seen.num_layers, seen.num_tokens, seen.num_seqs, seen.causal) == (2, num_tokens, 3, 1)
    assert (seen.eps, seen.scale) == pytest.approx((1e-6, 0.5 / 0.6931472))
    for name in DecoderRows.__slots__:
        assert getattr(seen, name) == getattr(rows, name).data_ptr()
    # Rows of a batch end where it does, so that the copy engine fills a tile with zeros.
    boxes = ((rows.hidden, tile), (rows.hidden, few), (rows.context, tile), (rows.narrow, tile))
    assert driver.maps[8:] == [
        (x.data_ptr(), [x.shape[1], num_tokens], [x.shape[1] * 2], [64, box], [1, 1])
        for i, (x, box) in enumerate(boxes)
        if i != 1 or few != tile  # a map is made once
    ]
    assert [entry[0] for entry in driver.maps[:8]] == [
        weight.data_ptr()
        for layer in layers
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]


def test_what_is_waited_for_is_nothing_before_a_launch(library, driver):
    kernels = DecoderKernels(library, [_layer()], torch.zeros(9, 128), eps=1e-6, scale=1, causal=False)
    kernels.kernels.memory["counters"].fill_(5)
    kernels.launch(_rows(16, 1), 0)
    (seen, counters), memory = driver.launches[0].seen, kernels.kernels.memory
    assert counters == [0] * 4 * 8 * 8
    assert memory["counters"].numel() == len(counters)
    for name in ("qkv", "partials", "squares"):
        assert (memory[name] == -1).all()
        assert getattr(seen, name) == memory[name].data_ptr()
    assert memory["qkv"].nbytes == 2 * 128 * 4096 * 2  # two layers in turns
    assert memory["partials"].nbytes == 8 * 128 * 1024 * 2
    assert memory["squares"].nbytes == 2 * 24 * 128 * 8


def test_half_a_head_is_seen_with_what_it_is_rotated_with_side_by_side():
    weight = torch.randn(256, 64).to(BF16)
    address, sizes, strides, box = half_head_view(weight.data_ptr(), 256, 64)
    assert (address, box) == (weight.data_ptr(), (64, 8, 2, 4, 1))
    elements = [1, *(stride // 2 for stride in strides)]
    view = weight.as_strided(sizes[::-1], elements[::-1])
    for head in range(2):
        for group in range(8):
            for half in range(2):
                first = head * 128 + half * 64 + group * 8
                torch.testing.assert_close(view[head, group, half], weight[first : first + 8])


def test_the_structure_and_the_numbers_are_the_source_s():
    """Fields in order, and constants that both sides must agree on."""
    parts = ("decoder_fetch", "decoder_layers", "stack_attention", "stack_exchange", "stack_ring")
    source = "".join((FOLDER / f"{part}.cuh").read_text("utf-8") for part in parts)
    struct = re.search(r"struct Stack \{(.*?)\n\};", source, re.DOTALL).group(1)
    fields = re.sub(r"//.*", "", struct)
    names = re.findall(r"\**(\w+)(?=[,;])", fields)
    assert names == [name for name, _ in DecoderStackArguments._fields_]
    for name, value in {
        "kBlocks": stack_module.BLOCKS,
        "kHidden": stack_module.HIDDEN,
        "kInner": kernels_module.INNER,
        "kMaxTokens": NARROW.max_tokens,
        "kParts": NARROW.parts,
        "kGroups": NARROW.groups,
        "kSplits": "kGroups",
        "kSharedBytes": f"{SHARED_BYTES // 1024} * 1024",
    }.items():
        assert re.search(rf"\b{name} = {re.escape(str(value))}\b", source), name
    heads = (kernels_module.QUERY_HEADS, kernels_module.KEY_HEADS, kernels_module.HEAD_DIM)
    for text in (
        "using H = Heads<{}, {}, {}, true>;".format(*heads),
        "kThreads = kComputing + 64;",
        f"kComputing = {NARROW.threads - 64}",
        f"(layer * kParts + part) * kGroups + group) * {stack_module._COUNTER_WORDS}",
        "enum Part { kAttentionPart, kMlpSumPart, kGatedPart, kNextSumPart };",
        "enum Weight { kQkvWeight, kOutputWeight, kGatedWeight, kDownWeight, kWeights };",
        "const __nv_bfloat16 *heads, *mlp, *next;",
        "kHeadTokens = kTokens > 32 ? kTokens / 2 : kTokens;",
    ):
        assert text in source, text
    assert NARROW.sums == NARROW.groups
    kernels = re.findall(r"^KERNEL\((\d+)\)", DECODER_STACK.path.read_text("utf-8"), re.MULTILINE)
    assert kernels == [str(tile) for tile in NARROW.tiles]


class _Weight(SimpleNamespace):
    """A projection that keeps its weight."""


def _decoder_layer(hidden: int = 1024, eps: float = 1e-6, heads: int = 16) -> DecoderLayer:
    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16)

    rope = QkRope(heads, 8, 128, 1e-6, weight(2, 128), torch.zeros(4, 128))
    width = (heads + 16) * 128
    return DecoderLayer(
        input_norm=RmsNorm(weight(hidden), eps),
        qkv=_Weight(weight=weight(width, hidden)),
        rope=rope,
        output=_Weight(weight=weight(hidden, heads * 128)),
        mlp_norm=RmsNorm(weight(hidden), eps),
        gate_up=_Weight(weight=weight(6144, hidden)),
        down=_Weight(weight=weight(hidden, 3072)),
    )


def test_layers_of_the_right_shape_are_taken(library, driver):
    layers = [_decoder_layer(), _decoder_layer()]
    stack = DecoderStack.of(layers, SPEC, lambda source: library if source is DECODER_STACK else None)
    assert stack is not None
    assert [stack.takes(rows) for rows in (1, 128, 129)] == [True, True, False]
    norms = stack._kernels[0].kernels.memory["layers"]
    assert norms[0].tolist() == [
        layers[0].rope.weight.data_ptr(),
        layers[0].mlp_norm.weight.data_ptr(),
        layers[1].input_norm.weight.data_ptr(),
    ]
    assert driver.maps[0][0] == layers[0].qkv.weight.data_ptr()


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (_decoder_layer(hidden=2560), SPEC),
        (_decoder_layer(eps=1e-5), SPEC),
        (_decoder_layer(heads=32), SPEC),
        (replace(_decoder_layer(), down=_Weight(weight=None)), SPEC),
        (replace(_decoder_layer(), rope=replace(_decoder_layer().rope, weight=None)), SPEC),
        (_decoder_layer(), replace(SPEC, window=64)),
        (_decoder_layer(), replace(SPEC, dtype=torch.float16)),
    ],
)
def test_other_layers_are_not(layer, spec, library):
    assert DecoderStack.of([_decoder_layer(), layer], spec, lambda source: library) is None


@pytest.mark.parametrize(("processors", "there"), [(132, True), (128, True), (114, False)])
def test_a_gpu_must_have_room_for_all_blocks(processors, there, library, monkeypatch):
    monkeypatch.setattr(stack_module, "cuda_library", lambda source: library)
    device = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    assert (stack_module.stack_library(DECODER_STACK) is library) == there


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_model_elsewhere_has_none_though_there_is_a_gpu(kind, library, monkeypatch):
    monkeypatch.setattr(stack_module, "stack_library", lambda source: library)
    assert DecoderStack.of([_decoder_layer()], replace(SPEC, device=torch.device(kind))) is None
    assert DecoderStack.of([_decoder_layer()], replace(SPEC, device=torch.device("cuda"))) is not None


def test_tensor_maps_are_never_given_up(library):
    """The copy engine may remember one by its address."""
    places = set()
    for _ in range(5):
        kernels = DecoderKernels(library, [_layer()], torch.zeros(9, 128), eps=1e-6, scale=1, causal=False)
        places.add(kernels.kernels.memory["weights"].data_ptr())
    assert len(places) == 5


def test_without_the_kernel_there_is_no_stack(monkeypatch):
    monkeypatch.setattr(stack_module, "cuda_library", lambda source: None)
    assert stack_module.stack_library(DECODER_STACK) is None
    assert DecoderStack.of([_decoder_layer()], replace(SPEC, device=torch.device("cuda"))) is None


def test_a_refused_launch_raises(library, driver):
    driver.launch_result = real.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    kernels = DecoderKernels(library, [_layer()], torch.zeros(9, 128), eps=1e-6, scale=1, causal=False)
    with pytest.raises(Exception, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        kernels.launch(_rows(16, 1), 0)
