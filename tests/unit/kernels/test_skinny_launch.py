"""What the driver is asked for, with a stand-in that keeps the real structures and runs nothing."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as real

from cuda_utils.errors import CudaError
from rose.kernels import gemm
from rose.kernels.cuda import cubin, launch
from rose.kernels.cuda.plan import SHARED_BYTES, SkinnyPlan

OK = real.CUresult.CUDA_SUCCESS


class FakeDriver:
    """cuda.bindings.driver, but for the calls that need a GPU: those are noted."""

    def __init__(self) -> None:
        self.maps: list[tuple[object, ...]] = []
        self.launches: list[SimpleNamespace] = []
        self.attributes: list[tuple[object, ...]] = []
        self.launch_result = OK

    def __getattr__(self, name: str) -> object:
        return getattr(real, name)

    def cuDeviceGet(self, index):  # noqa: N802
        return OK, index

    def cuLibraryLoadFromFile(self, name, *options):  # noqa: N802
        return OK, name.decode()

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        return OK, (library, name.decode())

    def cuKernelSetAttribute(self, attribute, value, kernel, device):  # noqa: N802
        self.attributes.append((attribute, value, kernel[1], device))
        return (OK,)

    def cuTensorMapEncodeTiled(self, dtype, rank, address, sizes, strides, box, steps, *modes):  # noqa: N802
        assert len(sizes) == rank == len(strides) + 1 == len(box) == len(steps)
        self.maps.append(
            (address, *([int(value) for value in values] for values in (sizes, strides, box, steps)))
        )
        return OK, real.CUtensorMap()

    def cuLaunchKernelEx(self, config, kernel, parameters, extra):  # noqa: N802
        pointers = (ctypes.c_void_p * 7).from_address(parameters)
        numbers = [ctypes.c_int.from_address(pointers[i]).value for i in range(3, 7)]
        out = ctypes.c_void_p.from_address(pointers[2]).value
        early, cluster = None, None  # read now: the structures die with the launch
        for attribute in config.attrs:
            if attribute.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                size = attribute.value.clusterDim
                cluster = (size.x, size.y, size.z)
            else:
                assert "PROGRAMMATIC_STREAM_SERIALIZATION" in attribute.id.name
                early = attribute.value.programmaticStreamSerializationAllowed
        self.launches.append(
            SimpleNamespace(
                kernel=kernel[1],
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes,
                stream=int(config.hStream),
                out=out,
                numbers=numbers,
                early=early,
                cluster=cluster,
                count=config.numAttrs,
            )
        )
        return (self.launch_result,)


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def kernels(driver):
    return launch.SkinnyKernels(Path("some.cubin"), 0, driver)


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
    assert (call.stream, call.out) == (77, out.data_ptr())
    assert call.numbers == [100, 1024, 8, 5]
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
    monkeypatch.setattr(launch, "skinny_kernels", lambda: None)
    x, weight, out = _tensors(16, 128, 512, 2)
    with pytest.raises(RuntimeError, match=r"run python -m rose\.kernels\.cuda\.build"):
        gemm.split_k_gemm(x, weight, SkinnyPlan(2, 1, 1, 4), out)


@pytest.fixture
def built(tmp_path, monkeypatch):
    source = tmp_path / "skinny_gemm.cu"
    source.write_text("// source")
    monkeypatch.setattr(cubin, "SOURCE", source)
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / cubin.CUBIN_NAME).write_bytes(b"code")
    cubin.write_record(folder, {"cuda": "13.0"})
    return folder


def test_an_intact_cubin_is_found(built, tmp_path):
    assert cubin.find_cubin([tmp_path / "nowhere", built]) == built / cubin.CUBIN_NAME
    assert cubin.find_cubin([tmp_path / "nowhere"]) is None


def test_a_cubin_of_another_source_is_left_alone(built, caplog):
    cubin.SOURCE.write_text("// newer source")
    assert cubin.find_cubin([built]) is None
    assert "built from another version of skinny_gemm.cu; build it again" in caplog.text


@pytest.mark.parametrize("damage", ["other bytes", "missing", "no JSON", "no hash"])
def test_a_damaged_cubin_is_left_alone(damage, built, caplog):
    record = built / cubin.RECORD_NAME
    if damage == "other bytes":
        (built / cubin.CUBIN_NAME).write_bytes(b"cod3")
    elif damage == "missing":
        (built / cubin.CUBIN_NAME).unlink()
    elif damage == "no JSON":
        record.write_text("{")
    else:
        record.write_text(json.dumps({"source_sha256": 1}))
    assert cubin.find_cubin([built]) is None
    assert str(built) in caplog.text
