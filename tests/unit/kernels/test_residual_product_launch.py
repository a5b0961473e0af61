"""Products that end in the residual stream: what the driver is asked for."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.aot.products import OWN_PRODUCTS, ProductKernel
from rose.kernels.cuda import residual_product
from rose.kernels.cuda.cubin import RESIDUAL_PRODUCT
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.residual_product import FEATURES, ResidualProduct
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedGemm
from tests.unit.kernels.fake_driver import FakeDriver

# Of the kernel's parameters behind its four tensor maps.
KINDS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
BF16 = torch.bfloat16


def _read(parameters: int) -> list[object]:
    pointers = (ctypes.c_void_p * (4 + len(KINDS))).from_address(parameters)
    return [kind.from_address(at).value for kind, at in zip(KINDS, pointers[4:], strict=True)]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(_read)


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))


def _kernel(driver: FakeDriver, tokens: int = 160, *, paired: bool = False) -> FusedGemm:
    product = ResidualProduct(
        CudaLibrary(Path("some.cubin"), 0, driver), tokens, paired=paired, processors=133
    )
    return FusedGemm(ProductKernel.parse(f"cuda-residual-{tokens}x128-1x{1 + paired}"), product, 133)


def _tensors(m: int, n: int, k: int) -> list[torch.Tensor]:
    """x, weight, residual, columns, out, sums."""
    shapes = ((m, k), (n, k), (m, n), (n,), (m, n))
    return [*(torch.zeros(shape, dtype=BF16) for shape in shapes), torch.zeros(m * n // 16)]


@pytest.mark.parametrize("paired", [False, True])
def test_a_launch_says_where_all_is(driver: FakeDriver, paired: bool) -> None:
    x, weight, residual, columns, out, sums = _tensors(300, 512, 192)
    partial = _kernel(driver, paired=paired).residual(x, weight, residual, columns, out, sums)
    (call,) = driver.launches
    name = "residual_paired_160" if paired else "residual_160"
    assert (call.kernel, call.grid, call.block) == (name, (8, 1, 1), (384, 1, 1))
    assert (call.shared, call.stream) == (227 * 1024, 77)
    assert (call.cluster, call.count) == (((2, 1, 1), 1) if paired else (None, 0))
    assert call.seen == [columns.data_ptr(), sums.data_ptr(), 300, 4, 3]
    assert (partial.data_ptr(), partial.shape) == (sums.data_ptr(), (300, 4))
    # Sizes, strides in bytes and boxes: of a pair of blocks, each fetches half of a tile's rows of x.
    assert driver.maps == [
        (weight.data_ptr(), [192, 512], [384], [64, 128], [1, 1]),
        (x.data_ptr(), [192, 300], [384], [64, 80 if paired else 160], [1, 1]),
        (residual.data_ptr(), [512, 300], [1024], [64, 160], [1, 1]),
        (out.data_ptr(), [512, 300], [1024], [64, 160], [1, 1]),
    ]


@pytest.mark.parametrize(("paired", "blocks"), [(False, 133), (True, 132)])
def test_no_more_blocks_than_run_at_once(driver: FakeDriver, paired: bool, blocks: int) -> None:
    _kernel(driver, 128, paired=paired).residual(*_tensors(128 * 17, 1024, 64))
    assert driver.launches[0].grid == (blocks, 1, 1)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("early", Early)
def test_it_comes_up_early_where_others_do(driver: FakeDriver, early: Early, paired: bool) -> None:
    with launching(early):
        _kernel(driver, paired=paired).residual(*_tensors(1, 256, 64))
    (call,) = driver.launches
    assert call.early == (1 if early else None)
    assert call.cluster == ((2, 1, 1) if paired else None)


@pytest.mark.parametrize(
    ("shape", "paired"),
    [((0, 256, 64), False), ((1, 256, 32), False), ((1, 192, 64), False), ((1, 384, 64), True)],
)
def test_other_sizes_are_refused(driver: FakeDriver, shape: tuple[int, int, int], paired: bool) -> None:
    with pytest.raises(ValueError, match="rows and a weight"):
        _kernel(driver, paired=paired).residual(*_tensors(*shape))
    assert not driver.launches


def test_the_source_has_these_sizes_and_kernels() -> None:
    text = " ".join(RESIDUAL_PRODUCT.path.read_text("utf-8").replace("\\\n", " ").split())
    assert f"kFeatures = 2 * kTileRows; constexpr int kProductThreads = kComputing + {_fetching()}," in text
    assert FEATURES == 2 * 64
    tokens = [int(tokens) for tokens in re.findall(r"\bKERNELS\((\d+)\)", text)]
    built = [(kernel.tile_m, kernel.tile_n, kernel.cluster_n) for kernel in OWN_PRODUCTS]
    assert built == [(rows, FEATURES, together) for rows in tokens for together in (1, 2)]
    kinds = set(re.findall(r"KERNEL\((\w+)##tokens, tokens, (\w+)\)", text))
    assert kinds == {("residual_", "false"), ("residual_paired_", "true")}
    names = ("weight", "x", "residual", "hidden")
    maps = ", ".join(f"const __grid_constant__ CUtensorMap {name}" for name in names)
    numbers = "const __nv_bfloat16* columns, float* partial, int num_tokens, int features, int chunks"
    assert f"void name( {maps}, {numbers})" in text


def _fetching() -> int:
    """Threads of a block that compute nothing."""
    return residual_product._THREADS - 256
