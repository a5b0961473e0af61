"""Products that end in the residual stream: what the driver is asked for."""

from __future__ import annotations

import ctypes

import pytest
import torch

from rose.aot.products import RESIDUAL_PRODUCT
from rose.kernels.cuda import cubin, pingpong
from rose.kernels.cuda.pingpong import FEATURES
from rose.kernels.cuda.residual_product import TOKENS, ResidualProduct
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedGemm
from tests.unit.kernels.fake_driver import FakeDriver
from tests.unit.kernels.pingpong_fake import STREAM, driver_noting, library_of, on_stream

# Of the kernel's parameters behind its four tensor maps.
KINDS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
BF16 = torch.bfloat16


@pytest.fixture
def driver() -> FakeDriver:
    return driver_noting(KINDS)


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stream(monkeypatch)


def _kernel(driver: FakeDriver) -> FusedGemm:
    product = ResidualProduct(library_of(driver), processors=133)
    return FusedGemm(RESIDUAL_PRODUCT, product, 133)


def _tensors(m: int, n: int, k: int) -> list[torch.Tensor]:
    """x, weight, residual, columns, out, sums."""
    shapes = ((m, k), (n, k), (m, n), (n,), (m, n))
    return [*(torch.zeros(shape, dtype=BF16) for shape in shapes), torch.zeros(m * n // 16)]


def test_a_launch_says_where_all_is(driver: FakeDriver) -> None:
    x, weight, residual, columns, out, sums = _tensors(300, 512, 192)
    partial = _kernel(driver).residual(x, weight, residual, columns, out, sums)
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.block) == ("residual_160", (8, 1, 1), (384, 1, 1))
    assert (call.shared, call.stream) == (227 * 1024, STREAM)
    assert (call.cluster, call.count) == ((2, 1, 1), 1)
    assert call.seen == [columns.data_ptr(), sums.data_ptr(), 300, 4, 3]
    assert (partial.data_ptr(), partial.shape) == (sums.data_ptr(), (300, 4))
    # Sizes, strides in bytes and boxes: each of a pair of blocks fetches half of a tile's rows of x.
    assert driver.maps == [
        (weight.data_ptr(), [192, 512], [384], [64, 128], [1, 1]),
        (x.data_ptr(), [192, 300], [384], [64, 80], [1, 1]),
        (residual.data_ptr(), [512, 300], [1024], [64, 160], [1, 1]),
        (out.data_ptr(), [512, 300], [1024], [64, 160], [1, 1]),
    ]


def test_no_more_pairs_of_blocks_than_run_at_once(driver: FakeDriver) -> None:
    _kernel(driver).residual(*_tensors(160 * 17, 1024, 64))
    assert driver.launches[0].grid == (132, 1, 1)


@pytest.mark.parametrize("early", Early)
def test_it_comes_up_early_where_others_do(driver: FakeDriver, early: Early) -> None:
    with launching(early):
        _kernel(driver).residual(*_tensors(1, 256, 64))
    (call,) = driver.launches
    assert call.early == (1 if early else None)
    assert call.cluster == (2, 1, 1)


@pytest.mark.parametrize("shape", [(0, 256, 64), (1, 256, 32), (1, 192, 64), (1, 384, 64)])
def test_other_sizes_are_refused(driver: FakeDriver, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="rows and a weight"):
        _kernel(driver).residual(*_tensors(*shape))
    assert not driver.launches


def test_the_source_has_these_sizes() -> None:
    path = cubin.RESIDUAL_PRODUCT.path
    shared = " ".join(path.with_name("pingpong.cuh").read_text("utf-8").split())
    text = " ".join(path.read_text("utf-8").split())
    assert f"kFeatures = 2 * kTileRows; constexpr int kProductThreads = kComputing + {_fetching()}," in shared
    assert FEATURES == 2 * 64
    assert f"product<{TOKENS}>(" in text
    assert (RESIDUAL_PRODUCT.tile_m, RESIDUAL_PRODUCT.tile_n) == (TOKENS, FEATURES)
    names = ("weight", "x", "residual", "hidden")
    maps = ", ".join(f"const __grid_constant__ CUtensorMap {name}" for name in names)
    numbers = "const __nv_bfloat16* columns, float* partial, int num_tokens, int features, int chunks"
    assert f"void residual_160( {maps}, {numbers})" in text


def _fetching() -> int:
    """Threads of a block that compute nothing."""
    return pingpong.THREADS - 256
