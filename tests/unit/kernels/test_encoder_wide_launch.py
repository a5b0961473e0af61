"""All layers of a BERT in one launch for up to 512 rows: what the driver is asked for, and when."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.kernels.cuda import encoder_stack, stack
from rose.kernels.cuda.cubin import ENCODER_STACK, ENCODER_WIDE
from rose.kernels.cuda.encoder_stack import EncoderKernels, EncoderRows, EncoderStackArguments
from rose.kernels.cuda.encoder_wide import COLUMNS, WideEncoderKernels
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.wide import TOKEN_TILES, WIDE
from rose.layers.encoder import EncoderBuffers
from rose.layers.encoder_stack import EncoderStack
from tests.unit.kernels.fake_driver import FakeDriver
from tests.unit.kernels.test_encoder_stack_launch import SPEC, _layer, _rows, _weights

MAPS = 5  # tensor maps before the structure
COUNTERS = WIDE.parts * WIDE.groups * 8


def _read(parameters: int) -> tuple[EncoderStackArguments, list[int]]:
    """The structure behind the tensor maps, and the counters as they are at the launch."""
    pointers, kind = (ctypes.c_void_p * (MAPS + 1)).from_address(parameters), EncoderStackArguments
    seen = kind.from_buffer_copy(ctypes.string_at(pointers[MAPS], ctypes.sizeof(kind)))
    return seen, list((ctypes.c_int * (seen.num_layers * COUNTERS)).from_address(seen.counters))


@pytest.fixture
def driver():
    return FakeDriver(_read)


@pytest.fixture
def library(driver):
    return CudaLibrary(Path("some.cubin"), 0, driver)


@pytest.mark.parametrize(("num_tokens", "kernel"), [(129, 256), (256, 256), (257, 512), (512, 512)])
def test_a_launch_says_all_of_a_batch(num_tokens, kernel, library, driver):
    layers, rows, tile = [_weights(), _weights()], _rows(num_tokens, 3), kernel // 4
    kernels = WideEncoderKernels(library, layers, eps=1e-5, scale=0.125)
    kernels.kernels.memory["counters"].fill_(5)
    kernels.launch(rows, 77)
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.block) == (f"encoder_wide_{kernel}", (128, 1, 1), (384, 1, 1))
    assert (call.shared, call.stream, call.cooperative, call.count) == (227 * 1024, 77, 1, 1)
    seen, counters = call.seen
    assert counters == [0] * 2 * COUNTERS
    assert (seen.num_layers, seen.num_tokens, seen.num_seqs) == (2, num_tokens, 3)
    assert (seen.eps, seen.scale) == pytest.approx((1e-5, 0.125 / 0.6931472))
    for name in EncoderRows.__slots__:
        assert getattr(seen, name) == getattr(rows, name).data_ptr()
    # Of QKV 32 rows of queries, keys and values each; of the others 128.
    for at, layer in zip((0, 4), layers, strict=True):
        qkv, others = layer.qkv, (layer.output, layer.wide, layer.narrow)
        assert driver.maps[at : at + 4] == [
            (qkv.data_ptr(), [1024, 1024, 3], [2048, 1024 * 2048], [64, 32, 3], [1, 1, 1]),
            *((x.data_ptr(), [x.shape[1], x.shape[0]], [x.shape[1] * 2], [64, 128], [1, 1]) for x in others),
        ]
    # Rows of a batch end where it does, so that the copy engine fills a tile with zeros; heads of two layers
    # lie as far apart as the kernel has rows.
    read = [
        (x.data_ptr(), [x.shape[1], num_tokens], [x.shape[1] * 2], [64, tile], [1, 1])
        for x in (rows.hidden, rows.context, rows.wide)
    ]
    heads = [
        (seen.qkv, [3072, num_tokens, 2], [6144, kernel * 6144], [64, box, 1], [1, 1, 1])
        for box in dict.fromkeys((64, tile))  # a map is made once
    ]
    assert driver.maps[8:] == [*read, *heads]


def test_what_is_waited_for_is_nothing_before_a_launch(library, driver):
    kernels = WideEncoderKernels(library, [_weights()], eps=1e-5, scale=1)
    kernels.launch(_rows(130, 1), 0)
    (seen, _), memory = driver.launches[0].seen, kernels.kernels.memory
    assert sorted(memory) == ["counters", "layers", "partials", "weights"]
    assert (memory["partials"] == -1).all()
    assert memory["partials"].data_ptr() == seen.partials
    assert memory["partials"].nbytes == 2 * 4 * 512 * 1024 * 2  # both halves of a layer, four parts of K
    assert (kernels._plain_memory["qkv"] == 0).all()
    assert kernels._plain_memory["qkv"].nbytes == 2 * 512 * 3072 * 2  # two layers in turns


def test_a_batch_takes_the_first_kernel_with_room(library, monkeypatch):
    launched = []
    for kind in (EncoderKernels, WideEncoderKernels):
        monkeypatch.setattr(kind, "launch", lambda self, rows, stream: launched.append(self.source))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    both = EncoderStack.of([_layer()], SPEC, lambda source: library)
    alone = EncoderStack.of([_layer()], SPEC, {ENCODER_WIDE: library}.get)
    assert both is not None
    assert alone is not None
    batch = SimpleNamespace(cu_seqlens=torch.zeros(2, dtype=torch.int32))
    for one, num_tokens in ((both, 1), (both, 128), (both, 129), (both, 512), (alone, 1)):
        assert one.takes(num_tokens)
        rows = _rows(num_tokens, 1)
        one(batch, rows.hidden, EncoderBuffers(context=rows.context, wide=rows.wide))
    assert launched == [ENCODER_STACK, ENCODER_STACK, ENCODER_WIDE, ENCODER_WIDE, ENCODER_WIDE]
    assert not both.takes(513)


def test_the_numbers_are_the_source_s():
    """Constants that both sides must agree on; those of tiles are a decoder's too."""
    source, blocks = ENCODER_WIDE.path.read_text("utf-8"), stack.BLOCKS // TOKEN_TILES
    assert re.findall(r"^KERNEL\((\d+)\)", source, re.MULTILINE) == [str(tile) for tile in WIDE.tiles]
    assert "kHalfHead = H::kHeadDim / 2, kHeadColumns = 3 * kHalfHead;" in source
    assert "kWeightBytes = kWideColumns * kColumnBytes;" in source
    assert stack.HIDDEN // (blocks // (WIDE.sums // 2)) == COLUMNS == encoder_stack.INNER // blocks
    assert encoder_stack.QKV_WIDTH == 3072
