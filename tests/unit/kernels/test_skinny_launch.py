"""What the driver is asked for, with a stand-in that keeps the real structures and runs nothing."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver as real

from cuda_utils.errors import CudaError
from rose.kernels import gemm
from rose.kernels.cuda import cubin, skinny_gemm
from rose.kernels.cuda.library import CudaLibrary
from rose.kernels.cuda.plan import SHARED_BYTES, SkinnyPlan
from tests.forbidden import forbid
from tests.unit.kernels.fake_driver import FakeDriver


def _read(parameters: int) -> tuple[int | None, list[int]]:
    """`out` and the numbers behind it."""
    pointers = (ctypes.c_void_p * 7).from_address(parameters)
    numbers = [ctypes.c_int.from_address(pointers[i]).value for i in range(3, 7)]
    return ctypes.c_void_p.from_address(pointers[2]).value, numbers


@pytest.fixture
def driver():
    return FakeDriver(_read)


@pytest.fixture
def kernels(driver):
    return skinny_gemm.SkinnyKernels(CudaLibrary(Path("some.cubin"), 0, driver))


def _tensors(m: int, n: int, k: int, splits: int) -> tuple[torch.Tensor, ...]:
    bf16 = torch.bfloat16
    return torch.zeros(m, k, dtype=bf16), torch.zeros(n, k, dtype=bf16), torch.zeros(splits, m, n, dtype=bf16)


def test_a_launch_says_all_of_the_plan(kernels, driver):
    x, weight, out = _tensors(100, 1024, 2048, 4)
    kernels.launch(x, weight, SkinnyPlan(4, 2, 2, 5), out, 77)
    (call,) = driver.launches
    assert call.kernel == "skinny_2x64_128"
    assert (call.grid, call.block) == ((8, 4, 1), (288, 1, 1))
    assert call.shared == 1024 + 5 * 128 * 128 + 8 * 2 * 64 * 128
    assert (call.stream, call.seen) == (77, (out.data_ptr(), [100, 1024, 8, 5]))
    assert (call.count, call.early, call.cluster) == (2, 1, (2, 1, 1))
    # x ends at row 100, so that the copy engine fills the tile with zeros; each block fetches half of it.
    assert driver.maps == [
        (weight.data_ptr(), [2048, 1024], [4096], [64, 64], [1, 1]),
        (x.data_ptr(), [2048, 100], [4096], [64, 64], [1, 1]),
    ]


def test_a_gated_weight_is_seen_as_rows_of_gate_and_up_in_turn(kernels, driver):
    x, weight, out = _tensors(16, 256, 128, 1)
    weight.copy_(torch.randn(256, 128))
    kernels.launch(x, weight, SkinnyPlan(1, 1, 1, 2, swiglu=True), out, 0)
    assert driver.launches[0].kernel == "skinny_gated_16"
    assert (driver.launches[0].count, driver.launches[0].early) == (1, 1)
    address, sizes, strides, box, _ = driver.maps[0]
    assert (address, box) == (weight.data_ptr(), [64, 8, 2, 4])
    elements = [1, *(stride // 2 for stride in strides)]
    view = weight.as_strided(sizes[::-1], elements[::-1])
    gate, up = weight.chunk(2)
    torch.testing.assert_close(view[1, 0], gate[8:16])
    torch.testing.assert_close(view[1, 1], up[8:16])


def test_kernels_and_maps_are_made_once(kernels, driver):
    x, weight, out = _tensors(16, 128, 512, 2)
    for _ in range(3):
        kernels.launch(x, weight, SkinnyPlan(2, 1, 1, 4), out, 0)
    assert (len(driver.maps), len(driver.attributes), len(driver.launches)) == (2, 1, 3)
    kernels.launch(x[:7], weight, SkinnyPlan(2, 1, 1, 4), out, 0)
    assert len(driver.maps) == 3
    limit = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.attributes == [(limit, SHARED_BYTES, "skinny_1x64_16", 0)]


def test_a_refused_launch_raises(kernels, driver):
    driver.launch_result = real.CUresult.CUDA_ERROR_INVALID_VALUE
    x, weight, out = _tensors(16, 128, 512, 2)
    with pytest.raises(CudaError, match=r"cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE \(1\)"):
        kernels.launch(x, weight, SkinnyPlan(2, 1, 1, 4), out, 0)


def test_without_kernels_a_product_says_what_to_run(monkeypatch):
    monkeypatch.setattr(skinny_gemm, "skinny_kernels", lambda: None)
    x, weight, out = _tensors(16, 128, 512, 2)
    with pytest.raises(RuntimeError, match=r"run python -m rose\.kernels\.cuda\.build"):
        gemm.split_k_gemm(x, weight, SkinnyPlan(2, 1, 1, 4), out)


@dataclass(frozen=True)
class Built:
    """A source, and the folder of its cubin."""

    source: cubin.CudaSource
    folder: Path

    def found(self, *folders: Path) -> Path | None:
        return cubin.find_cubin(self.source, folders)


@pytest.fixture
def built(tmp_path):
    source = cubin.CudaSource(tmp_path / "some_kernels.cu")
    source.path.write_text("// source")
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / source.cubin_name).write_bytes(b"code")
    cubin.write_record(source, folder, {"cuda": "13.0"})
    return Built(source, folder)


def test_an_intact_cubin_is_found(built, tmp_path):
    assert built.source.cubin_name == "some-kernels-sm_90a.cubin"
    assert built.found(tmp_path / "nowhere", built.folder) == built.folder / built.source.cubin_name
    assert built.found(tmp_path / "nowhere") is None


def test_a_cubin_out_of_reach_is_ignored_with_a_log_line(built, monkeypatch, caplog):
    forbid(monkeypatch, built.folder)
    assert built.found(built.folder) is None
    (line,) = caplog.messages
    assert line.startswith(f"ignored {built.folder / built.source.record_name}: PermissionError")


@pytest.mark.parametrize("changed", ["some_kernels.cu", "shared.cuh"])
def test_a_cubin_of_another_source_is_left_alone(changed, built, caplog):
    built.source.path.with_name(changed).write_text("// newer source")
    assert built.found(built.folder) is None
    assert "built from another version of some_kernels.cu; build it again" in caplog.text


@pytest.mark.parametrize("damage", ["other bytes", "missing", "no JSON", "no hash"])
def test_a_damaged_cubin_is_left_alone(damage, built, caplog):
    record = built.folder / built.source.record_name
    if damage == "other bytes":
        (built.folder / built.source.cubin_name).write_bytes(b"cod3")
    elif damage == "missing":
        (built.folder / built.source.cubin_name).unlink()
    elif damage == "no JSON":
        record.write_text("{")
    else:
        record.write_text(json.dumps({"source_sha256": 1}))
    assert built.found(built.folder) is None
    assert str(built.folder) in caplog.text
