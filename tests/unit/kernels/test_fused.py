"""Which product is fused, what its kernel is given, and that a missing kernel leaves all as it was."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.aot.manifest import KernelRecord, sha256_of, write_manifest
from rose.aot.products import (
    DEFAULT_PRODUCTS,
    EPILOGUES,
    OWN_PRODUCTS,
    RESIDUAL_PRODUCT,
    UNSCALED_ROTARY_PRODUCT,
    Epilogue,
    ProductKernel,
)
from rose.kernels import fused
from rose.kernels.cuda import cubin
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.fused import FusedChoice, FusedGemm, choice, read_table
from rose.kernels.gemm import WeightKey
from rose.kernels.row_scale import row_scale
from tests.unit.kernels.fake_driver import FakeDriver
from tests.unit.kernels.fused_fake import fake_gemm, fake_lookup

KERNEL = ProductKernel("swiglu", 128, 192, True, 2, 1)


def line(**changes: object) -> dict[str, object]:
    return {"epilogue": "swiglu", "n": 64, "k": 32, "min_m": 512, "kernel": KERNEL.name} | changes


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text(json.dumps({"device": "NVIDIA H200", "choices": list(lines)}))
    return path


def test_names_are_read_back() -> None:
    assert KERNEL.name == "gemm-swiglu-128x192-pingpong-2x1"
    other = replace(KERNEL, epilogue="scaled-swiglu", pingpong=False)
    for kernel in (*DEFAULT_PRODUCTS, *OWN_PRODUCTS, other):
        assert ProductKernel.parse(kernel.name) == kernel
    assert RESIDUAL_PRODUCT.name == "cuda-residual-160x128-1x2"
    own = ("cuda-residual-64x128-1x1", "cuda-swiglu-160x128-1x1")
    for name in (*own, "gemm-relu-128x192-pingpong-2x1", "fa4", "gemm-swiglu-128-pingpong-2x1"):
        with pytest.raises(ValueError, match="names no product"):
            ProductKernel.parse(name)
    with pytest.raises(ValueError, match="names no product"):
        ProductKernel.parse(f"{KERNEL.name}x")


def test_every_epilogue_is_built() -> None:
    assert {kernel.epilogue for kernel in DEFAULT_PRODUCTS} <= set(EPILOGUES)


def test_a_choice_holds_from_its_rows_on(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t", line(min_m=4096, kernel=None), line(), line(n=8, min_m=1)))
    key = ("swiglu", 64, 32)
    assert table[key] == [FusedChoice(512, KERNEL), FusedChoice(4096, None)]
    assert not any(one.early for one in table[key])
    small, large = table[key]
    chosen = [choice(table[key], m) for m in (1, 511, 512, 4095, 4096)]
    assert chosen == [None, None, small, small, large]
    assert choice((), 9999) is None


def test_a_choice_may_say_that_layers_are_launched_early(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t", line(early=True), line(min_m=4096, early=False)))
    assert [one.early for one in table["swiglu", 64, 32]] == [True, False]


def test_a_table_of_wrong_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gemm-swiglu-128x192-pingpong-2x1 for a product with gelu"):
        read_table(write(tmp_path / "t", line(epilogue="gelu")))


def test_the_shipped_table_names_kernels_that_are_built() -> None:
    named = {one.kernel for choices in fused.table().values() for one in choices} - {None}
    assert named
    assert named <= {*DEFAULT_PRODUCTS, *OWN_PRODUCTS}
    counts = fused.fused_row_counts()
    used = {choice(choices, m) for choices in fused.table().values() for m in counts}
    assert named <= {one.kernel for one in used if one is not None}


# (n, k, ending) of a layer's four weights.
PPLX_EMBED = (4096, 1024, "sum"), (1024, 2048, "sum"), (6144, 1024, "swiglu"), (1024, 3072, "sum")
BGE_M3 = (3072, 1024, "bias"), (1024, 1024, "sum"), (4096, 1024, "gelu"), (1024, 4096, "sum")
ROWS = (255, 256, 320, 384, 448, 511, 512, 513, 640, 767, 768, 1023, 1024, 1025, 1536, 2047, 2048, 8192)


def shipped(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm | None:
    one = choice(fused.table().get((epilogue, n, k), ()), m)
    return None if one is None or one.kernel is None else fake_gemm(one.kernel)


def test_in_the_shipped_table_a_whole_layer_is_fused_or_none_of_its_parts() -> None:
    """Products that leave sums to the next one, or take them, serve together or not at all."""
    for m in ROWS:
        output, down = (shipped("residual", m, 1024, k) for k in (2048, 3072))
        by_sums = [shipped("rms-swiglu", m, 6144, 1024), shipped("rms-rope", m, 4096, 1024)]
        by_factors = [shipped("scaled-swiglu", m, 6144, 1024), shipped("rope", m, 4096, 1024)]
        found = [one is not None for one in (*by_sums, *by_factors)]
        assert (output is not None) is (down is not None) is any(found)
        assert found in ([False] * 4, [True, True, False, False], [False, False, True, True])


@pytest.mark.parametrize("m", [10_240, 25_600, 51_200])
def test_where_our_own_product_is_not_built_heads_are_fused(m: int) -> None:
    assert shipped("residual", m, 1024, 2048) is not None
    assert shipped("unscaled-rope", m, 4096, 1024) is not None


def test_tiles_that_all_run_at_once_where_they_were_measured_are_not_taken_for_more_rows() -> None:
    for rows in range(512, 1025, 64):
        for (_, n, _k), choices in fused.table().items():
            one = choice(choices, rows)
            if one is None or one.kernel is None or not one.early or one.kernel.pingpong:
                continue
            kernel = one.kernel
            assert -(-rows // kernel.tile_m) * -(-n // kernel.tile_n) <= 132, (kernel.name, rows)


@pytest.mark.parametrize(
    ("keys", "early"),
    [
        (PPLX_EMBED, {256, 320, 384, 448, 511, 512, 768, 1023, 1024, 1025, 1536, 2047, 2048, 8192}),
        (BGE_M3, {512, 513, 640, 767, 768, 1023, 1024, 1025, 1536, 2047, 2048}),
        (PPLX_EMBED[2:3], {256, 320, 384, 448, 511, 512, 2048, 8192}),
        (((4096, 1024, "swiglu"),), set()),
        ((), set()),
    ],
)
def test_layers_are_launched_early_where_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[WeightKey, ...], early: set[int]
) -> None:
    monkeypatch.setattr(fused, "load", fake_gemm)
    assert {m for m in ROWS if fused.gains_early(m, keys)} == early
    monkeypatch.setattr(fused, "load", lambda kernel: None)
    assert not any(fused.gains_early(m, keys) for m in ROWS)  # what is not built says nothing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of kernels, on what says it is a Hopper GPU."""
    monkeypatch.setattr(fused, "default_folders", lambda: (tmp_path,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fused, "table", lambda: {("swiglu", 64, 32): [FusedChoice(1, KERNEL)]})
    fused.load.cache_clear()
    yield tmp_path
    fused.load.cache_clear()


def test_without_a_kernel_nothing_is_fused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert fused.fused_gemm("swiglu", 4096, 64, 32) is None
        assert fused.fused_gemm("swiglu", 4096, 64, 32) is None
    assert caplog.text.count("no kernel built for gemm-swiglu-128x192-pingpong-2x1") == 1
    assert fused.fused_gemm("gelu", 4096, 64, 32) is None


def test_our_own_product_is_loaded_from_its_cubin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries: dict[cubin.CudaSource, CudaLibrary] = {}
    monkeypatch.setattr(fused, "cuda_library", libraries.get)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=132)
    )
    assert fused.load(RESIDUAL_PRODUCT) is None
    libraries[cubin.RESIDUAL_PRODUCT] = CudaLibrary(Path("some.cubin"), 0, FakeDriver())
    fused.load.cache_clear()
    loaded = fused.load(RESIDUAL_PRODUCT)
    assert loaded is not None
    assert (loaded.kernel, loaded.sum_parts(1024)) == (RESIDUAL_PRODUCT, 8)
    assert fused.load(UNSCALED_ROTARY_PRODUCT) is None
    libraries[cubin.ROTARY_PRODUCT] = CudaLibrary(Path("other.cubin"), 0, FakeDriver())
    fused.load.cache_clear()
    rotary = fused.load(UNSCALED_ROTARY_PRODUCT)
    assert rotary is not None
    assert sorted(rotary.angle_order) == list(range(64)) != list(rotary.angle_order)


def test_without_a_gpu_no_kernel_is_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fused, "default_folders", lambda: pytest.fail("looked"))
    assert fused.fused_gemm("swiglu", 4096, 64, 32) is None


def test_a_broken_kernel_is_named_and_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "broken.so"
    path.write_bytes(b"no shared object")
    record = KernelRecord(
        path.name, KERNEL.name, None, None, None, "bfloat16", "sm_90a", {}, sha256_of(path), 16
    )
    write_manifest(folder, [record])
    assert fused.fused_gemm("swiglu", 4096, 64, 32) is None
    assert f"cannot use {path}" in caplog.text


def test_swiglu_and_gelu_pass_their_operands() -> None:
    x, weight, bias = torch.randn(5, 32), torch.randn(64, 32), torch.randn(64)
    scale, half, out = torch.rand(5) + 0.5, torch.empty(5, 32), torch.empty(5, 64)
    gate, up = (x @ weight.T).chunk(2, dim=1)
    fake_lookup("swiglu", 5, 64, 32).swiglu(x, weight, half)
    torch.testing.assert_close(half, torch.nn.functional.silu(gate) * up)
    fake_lookup("scaled-swiglu", 5, 64, 32).scaled_swiglu(x, weight, scale, half)
    gate, up = gate * scale[:, None], up * scale[:, None]
    torch.testing.assert_close(half, torch.nn.functional.silu(gate) * up)
    fake_lookup("gelu", 5, 64, 32).gelu(x, weight, bias, out)
    torch.testing.assert_close(out, torch.nn.functional.gelu(x @ weight.T + bias))
    with pytest.raises(ValueError, match="64 rows into 64 columns"):
        fake_lookup("swiglu", 5, 64, 32).swiglu(x, weight, out)


def test_residual_and_row_scale_are_rms_norm_in_two_parts() -> None:
    x, weight, columns = torch.randn(5, 32), torch.randn(192, 32), torch.randn(192)
    residual, out, scale = torch.randn(5, 192), torch.empty(5, 192), torch.empty(5)
    total = residual + x @ weight.T
    kernel = fake_lookup("residual", 5, 192, 32)
    sums = kernel.residual(x, weight, residual, columns, out, torch.empty(64))
    assert sums.shape == (5, 2)  # 192 columns are one and a half tiles
    row_scale(sums, 192, 1e-6, scale)
    torch.testing.assert_close(residual, total)
    expected = torch.nn.functional.rms_norm(total, (192,), columns, 1e-6)
    torch.testing.assert_close(out * scale[:, None], expected)
