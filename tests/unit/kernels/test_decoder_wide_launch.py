"""All layers of a Qwen3 in one launch for up to 512 rows: what the driver is asked for, and when."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.kernels.cuda import decoder_stack, stack
from rose.kernels.cuda.cubin import DECODER_STACK, DECODER_WIDE
from rose.kernels.cuda.decoder_stack import DecoderKernels, DecoderRows, DecoderStackArguments
from rose.kernels.cuda.decoder_wide import WideDecoderKernels
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.wide import QUERIES, TOKEN_TILES, WIDE
from rose.layers.decoder_stack import DecoderStack
from tests.unit.kernels.fake_driver import FakeDriver
from tests.unit.kernels.test_decoder_stack_launch import SPEC, _decoder_layer, _layer, _rows

MAPS = 5  # tensor maps before the structure
COUNTERS = WIDE.parts * WIDE.groups * 8


def _read(parameters: int) -> tuple[DecoderStackArguments, list[int]]:
    """The structure behind the tensor maps, and the counters as they are at the launch."""
    pointers = (ctypes.c_void_p * (MAPS + 1)).from_address(parameters)
    seen = DecoderStackArguments.from_buffer_copy(
        ctypes.string_at(pointers[MAPS], ctypes.sizeof(DecoderStackArguments))
    )
    return seen, list((ctypes.c_int * (seen.num_layers * COUNTERS)).from_address(seen.counters))


@pytest.fixture
def driver():
    return FakeDriver(_read)


@pytest.fixture
def library(driver):
    return CudaLibrary(Path("some.cubin"), 0, driver)


@pytest.mark.parametrize(("num_tokens", "kernel"), [(129, 256), (256, 256), (257, 512), (512, 512)])
def test_a_launch_says_all_of_a_batch(num_tokens, kernel, library, driver):
    layers, rows, tile = [_layer(), _layer()], _rows(num_tokens, 3), kernel // 4
    kernels = WideDecoderKernels(library, layers, torch.zeros(9, 128), eps=1e-6, scale=0.5, causal=True)
    kernels.kernels.memory["counters"].fill_(5)
    kernels.launch(rows, 77)
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.block) == (f"decoder_wide_{kernel}", (128, 1, 1), (384, 1, 1))
    assert (call.shared, call.stream, call.cooperative, call.count) == (227 * 1024, 77, 1, 1)
    seen, counters = call.seen
    assert counters == [0] * 2 * COUNTERS
    assert (seen.num_layers, seen.num_tokens, seen.num_seqs, seen.causal) == (2, num_tokens, 3, 1)
    assert (seen.eps, seen.scale) == pytest.approx((1e-6, 0.5 / 0.6931472))
    for name in DecoderRows.__slots__:
        assert getattr(seen, name) == getattr(rows, name).data_ptr()
    # Rows of a batch end where it does, so that the copy engine fills a tile with zeros; heads of two layers
    # lie as far apart as the kernel has rows.
    read = [
        (x.data_ptr(), [x.shape[1], num_tokens], [x.shape[1] * 2], [64, tile], [1, 1])
        for x in (rows.hidden, rows.context, rows.narrow)
    ]
    heads = [
        (seen.qkv, [4096, num_tokens, 2], [8192, kernel * 8192], [64, box, 1], [1, 1, 1])
        for box in dict.fromkeys((64, tile))  # a map is made once
    ]
    assert driver.maps[8:] == [*read, *heads]


def test_what_is_waited_for_is_nothing_before_a_launch(library, driver):
    kernels = WideDecoderKernels(library, [_layer()], torch.zeros(9, 128), eps=1e-6, scale=1, causal=False)
    kernels.launch(_rows(130, 1), 0)
    (seen, _), memory = driver.launches[0].seen, kernels.kernels.memory
    assert sorted(memory) == ["counters", "layers", "partials", "weights"]
    assert (memory["partials"] == -1).all()
    assert memory["partials"].data_ptr() == seen.partials
    assert memory["partials"].nbytes == 2 * 4 * 512 * 1024 * 2  # both halves of a layer, four parts of K
    assert seen.squares is None
    assert (kernels._plain_memory["qkv"] == 0).all()
    assert kernels._plain_memory["qkv"].nbytes == 2 * 512 * 4096 * 2  # two layers in turns


def test_a_batch_takes_the_first_kernel_with_room(library, monkeypatch):
    launched = []
    for kind in (DecoderKernels, WideDecoderKernels):
        monkeypatch.setattr(kind, "launch", lambda self, rows, stream: launched.append(self.source))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    both = DecoderStack.of([_decoder_layer()], SPEC, lambda source: library)
    alone = DecoderStack.of([_decoder_layer()], SPEC, {DECODER_WIDE: library}.get)
    assert both is not None
    assert alone is not None
    batch = SimpleNamespace(cu_seqlens=torch.zeros(2, dtype=torch.int32))
    for one, num_tokens in ((both, 1), (both, 128), (both, 129), (both, 512), (alone, 1)):
        assert one.takes(num_tokens)
        rows = _rows(num_tokens, 1)
        assert one(batch, rows) is rows.hidden
    assert launched == [DECODER_STACK, DECODER_STACK, DECODER_WIDE, DECODER_WIDE, DECODER_WIDE]
    assert not both.takes(513)


def test_the_numbers_are_the_source_s():
    """Constants that both sides must agree on."""
    folder = DECODER_WIDE.path.parent
    files = DECODER_WIDE.path, folder / "wide_share.cuh", folder / "wide_sums.cuh"
    source = "".join(file.read_text("utf-8") for file in files)
    for name, value in {
        "kTokenTiles": TOKEN_TILES,
        "kWideSplits": WIDE.sums // 2,
        "kQueries": QUERIES,
        "kWideGroups": "kWideSplits * kTokenTiles",
        "kWideThreads": f"kComputing + {WIDE.threads - 256}",
    }.items():
        assert re.search(rf"\b{name} = {re.escape(str(value))}\b", source), name
    assert WIDE.groups == WIDE.sums // 2 * TOKEN_TILES
    parts = re.search(r"enum WidePart \{ (.*?), kWideParts \};", source).group(1)
    assert len(parts.split(", ")) == WIDE.parts
    assert "enum LayerHalf { kAttentionHalf, kMlpHalf };" in source
    assert f"(layer * kWideParts + part) * kWideGroups + group) * {stack._COUNTER_WORDS}" in source
    assert re.findall(r"^KERNEL\((\d+)\)", source, re.MULTILINE) == [str(tile) for tile in WIDE.tiles]
    assert decoder_stack.QKV_WIDTH == 4096
