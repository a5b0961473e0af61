"""Chained attention: what the driver is asked for."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from rose.kernels.cuda import chained_attention
from rose.kernels.cuda.chained_attention import ChainedKernels, ListedWorks
from rose.kernels.cuda.cubin import CHAINED_ATTENTION
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.early import Early, launching
from tests.unit.kernels.fake_driver import FakeDriver

# Of the kernel's parameters behind its three tensor maps.
KINDS = (
    *(ctypes.c_void_p, ctypes.c_int64) * 4,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_float,
)


def _read(parameters: int) -> list[object]:
    pointers = (ctypes.c_void_p * (3 + len(KINDS))).from_address(parameters)
    return [kind.from_address(at).value for kind, at in zip(KINDS, pointers[3:], strict=True)]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(_read)


def _kernels(driver: FakeDriver, *, causal: bool = False, paired: bool = False) -> ChainedKernels:
    return ChainedKernels(CudaLibrary(Path("some.cubin"), 0, driver), causal=causal, paired=paired)


@pytest.fixture
def kernels(driver: FakeDriver) -> ChainedKernels:
    return _kernels(driver)


def _launch(kernels: ChainedKernels, dim: int = 128) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    qkv = torch.zeros(300, 8, dim, dtype=torch.bfloat16)
    out = torch.zeros(300, 4, dim, dtype=torch.bfloat16)
    heads, works = list(torch.split(qkv, [4, 2, 2], dim=1)), torch.zeros(64, dtype=torch.uint8)
    kernels.launch(heads, out, ListedWorks(works, 12, 132), 0.25, 77)
    return heads, out, works


@pytest.mark.parametrize("dim", [64, 128])
def test_a_launch_says_where_heads_and_works_are(
    kernels: ChainedKernels, driver: FakeDriver, dim: int
) -> None:
    heads, out, works = _launch(kernels, dim)
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.block) == (f"chained_{dim}", (132, 1, 1), (384, 1, 1))
    assert (call.shared, call.stream, call.count) == (227 * 1024, 77, 0)
    rows = [number for x in heads for number in (x.data_ptr(), 8 * dim)]
    assert call.seen == [*rows, out.data_ptr(), 4 * dim, works.data_ptr(), 12, 2, 0.25]
    # Rows are those of the packed product; of each a box is 64 columns of a tile.
    assert driver.maps == [
        (x.data_ptr(), [count * dim, 300], [8 * dim * 2], [64, 128], [1, 1])
        for x, count in zip(heads, (4, 2, 2), strict=True)
    ]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("early", Early)
def test_it_comes_up_early_where_others_do(driver: FakeDriver, early: Early, paired: bool) -> None:
    with launching(early):
        _launch(_kernels(driver, paired=paired))
    assert driver.launches[0].early == (1 if early else None)


def test_pairs_of_blocks_fetch_half_a_tile_of_keys_each(driver: FakeDriver) -> None:
    _launch(_kernels(driver, paired=True))
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.cluster, call.count) == (
        "chained_paired_128",
        (132, 1, 1),
        (2, 1, 1),
        1,
    )
    assert [boxes for *_, boxes, _ in driver.maps] == [[64, 128], [64, 64], [64, 64]]


@pytest.mark.parametrize("paired", [False, True])
def test_causal_attention_has_kernels_of_its_own(driver: FakeDriver, paired: bool) -> None:
    _launch(_kernels(driver, causal=True, paired=paired), 64)
    assert driver.launches[0].kernel == ("chained_causal_paired_64" if paired else "chained_causal_64")


def _source() -> str:
    folder = CHAINED_ATTENTION.path.parent
    names = (CHAINED_ATTENTION.path.name, "chained_fetch.cuh", "stack_exchange.cuh")
    return " ".join(
        " ".join((folder / name).read_text("utf-8").replace("\\\n", " ").split()) for name in names
    )


def test_the_source_has_these_sizes() -> None:
    text = _source()
    for name in ("kQueries", "kKeys"):
        assert re.search(rf"\b{name} = {chained_attention.TILE_ROWS}\b", text), name
    assert "kAttentionThreads = kComputing + 128," in text
    assert f"kComputing = {chained_attention._THREADS - 128}," in text


def test_the_source_has_these_kernels() -> None:
    text = _source()
    kinds = set(re.findall(r"KERNEL\(chained_(\w*)##dim, dim, (\w+), (\w+)\)", text))
    assert kinds == {
        ("", "false", "false"),
        ("causal_", "true", "false"),
        ("paired_", "false", "true"),
        ("causal_paired_", "true", "true"),
    }
    assert set(re.findall(r"\bKERNELS\((\d+)\)", text)) == {"64", "128"}
    maps = ", ".join(f"const __grid_constant__ CUtensorMap {name}" for name in "qkv")
    heads = ", ".join(f"const __nv_bfloat16* {name}s, int64_t {name}_stride" for name in "qkv")
    numbers = "__nv_bfloat16* out, int64_t stride, const int* list, int capacity, int group, float scale"
    assert f"void name( {maps}, {heads}, {numbers})" in text
