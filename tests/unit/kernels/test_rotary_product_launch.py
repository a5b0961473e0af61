"""QKV with its heads normed and rotated: what the driver is asked for, and in which order angles are."""

from __future__ import annotations

import ctypes

import pytest
import torch

from rose.aot.products import ROTARY_PRODUCT, UNSCALED_ROTARY_PRODUCT, ProductKernel
from rose.kernels.cuda import cubin
from rose.kernels.cuda.rotary_product import ANGLE_ORDER, TOKENS, RotaryProduct
from rose.kernels.fused import FusedGemm, RopeColumns
from tests.unit.kernels.fake_driver import FakeDriver
from tests.unit.kernels.pingpong_fake import STREAM, driver_noting, library_of, on_stream

# Of the kernel's parameters behind its four tensor maps.
KINDS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)
BF16 = torch.bfloat16


@pytest.fixture
def driver() -> FakeDriver:
    return driver_noting(KINDS)


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    on_stream(monkeypatch)


def _gemm(driver: FakeDriver, kernel: ProductKernel) -> FusedGemm:
    return FusedGemm(kernel, RotaryProduct(library_of(driver), processors=133), 133)


def _tensors(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, RopeColumns, torch.Tensor, torch.Tensor]:
    """x, a weight of two query heads, one of keys and one of values, columns, angles, out."""
    weight = torch.zeros(512, k, dtype=BF16)
    columns = RopeColumns(torch.zeros(512, dtype=BF16), torch.zeros(512, dtype=BF16), 3)
    angles = torch.zeros(m, 128, dtype=torch.float16)
    return torch.zeros(m, k, dtype=BF16), weight, columns, angles, torch.zeros(m, 512, dtype=BF16)


@pytest.mark.parametrize("kernel", [ROTARY_PRODUCT, UNSCALED_ROTARY_PRODUCT])
def test_a_launch_says_where_all_is(kernel: ProductKernel, driver: FakeDriver) -> None:
    x, weight, columns, angles, out = _tensors(300, 192)
    scale = torch.zeros(300) if kernel is ROTARY_PRODUCT else None
    _gemm(driver, kernel).rope(x, weight, columns, scale, angles, out)
    (call,) = driver.launches
    assert (call.kernel, call.grid, call.block) == ("rotary_128", (12, 1, 1), (384, 1, 1))
    assert (call.shared, call.stream, call.cluster) == (227 * 1024, STREAM, (2, 1, 1))
    assert call.seen == [columns.weight.data_ptr(), None if scale is None else scale.data_ptr(), 300, 4, 3, 3]
    # Sizes, strides in bytes and boxes: each of a pair of blocks fetches half of a tile's rows of x.
    assert driver.maps == [
        (weight.data_ptr(), [192, 512], [384], [64, 128], [1, 1]),
        (x.data_ptr(), [192, 300], [384], [64, 64], [1, 1]),
        (angles.data_ptr(), [128, 300], [256], [64, 128], [1, 1]),
        (out.data_ptr(), [512, 300], [1024], [64, 128], [1, 1]),
    ]


def test_angles_of_other_rows_or_heads_are_refused(driver: FakeDriver) -> None:
    x, weight, columns, angles, out = _tensors(300, 192)
    for wrong in (angles[:299], angles[:, :64]):
        with pytest.raises(ValueError, match="a head has 128 columns"):
            _gemm(driver, UNSCALED_ROTARY_PRODUCT).rope(x, weight, columns, None, wrong, out)
    assert not driver.launches


def test_each_pair_has_its_angle_where_its_lane_looks() -> None:
    """A lane has columns 8 i + 2 lane and the next of a row; it reads four angles, 16 bytes, at a time."""
    order = ANGLE_ORDER
    assert sorted(order) == list(range(64))
    for lane in range(4):
        for part in range(4):
            half, piece = part // 2, 2 * lane + part % 2  # of 128 bytes, of 16
            read = order[half * 32 + piece * 4 :][:4]
            assert [2 * pair for pair in read] == [8 * (part * 4 + i) + 2 * lane for i in range(4)]


def test_the_source_has_these_sizes() -> None:
    text = " ".join(cubin.ROTARY_PRODUCT.path.read_text("utf-8").split())
    assert "kRotaryTokens = 2 * kTileRows; constexpr int kHalfBytes" in text and TOKENS == 2 * 64
    assert (ROTARY_PRODUCT.tile_m, ROTARY_PRODUCT.tile_n) == (TOKENS, 128)
    names = ("weight", "x", "angles", "out")
    maps = ", ".join(f"const __grid_constant__ CUtensorMap {name}" for name in names)
    operands = "const __nv_bfloat16* columns, const float* scale"
    numbers = "int num_tokens, int features, int chunks, int rotated"
    assert f"void rotary_128( {maps}, {operands}, {numbers})" in text
