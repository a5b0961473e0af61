"""What is brought up where: only what can run, and never an exception for what is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rose.aot.manifest import KernelRecord, sha256_of, write_manifest
from rose.attention import backends, fa4, flashinfer
from rose.attention.backends import load_backends, write_empty_lists
from rose.attention.base import AttentionSpec
from rose.attention.work_list import Fa2List, Fa3List
from rose.kernels.cuda.cubin import CHAINED_ATTENTION
from tests.programs import output_of


def spec_of(device: str, head_dim: int = 128) -> AttentionSpec:
    return AttentionSpec(16, 8, head_dim, 0.1, False, torch.bfloat16, torch.device(device))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as the loader sees: its compute capability, and memory that is really the host's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    for plan in (Fa2List, Fa3List):
        monkeypatch.setattr(plan, "write", lambda *_: None)
    real = torch.empty

    def on_host(
        *size: int, device: object = None, pin_memory: bool = False, **options: object
    ) -> torch.Tensor:
        return real(*size, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", on_host)


def fill(folder: Path, *kernels: str, head_dim: int = 128) -> None:
    records = []
    for kernel in kernels:
        path = folder / f"{kernel}.so"
        path.write_bytes(kernel.encode())
        group, causal = (2, False) if kernel.startswith("fa4") else (None, None)
        records.append(
            KernelRecord(
                path.name, kernel, head_dim, group, causal, "bfloat16", "sm_90a", {}, sha256_of(path), 1
            )
        )
    write_manifest(folder, records)


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *_: object) -> None:
    """What every kernel must do with sequences of one token."""
    out.copy_(v.repeat_interleave(out.shape[1] // v.shape[1], dim=1))


class RaggedModule:
    """A FlashInfer module that is right for sequences of one token."""

    def ragged_run(self, *arguments: torch.Tensor) -> None:
        right(*arguments[3:6], arguments[8])


def module_of(kernel: Callable[..., None] = right) -> SimpleNamespace:
    return SimpleNamespace(func=kernel, ragged_run=RaggedModule().ragged_run)


def no_module(*_: object) -> None:
    raise ImportError("not installed here")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "jit_kernel", no_module)
    monkeypatch.setattr(flashinfer, "jit_module", no_module)


def test_on_a_cpu_torch_serves_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = load_backends(spec_of("cpu"))
    assert list(found) == ["sdpa"]
    assert "attention on cpu, 16/8 heads of 128: sdpa" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_on_hopper_every_kernel_of_the_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "fa4", "fa4-64x128-early", "flashinfer-fa3", "flashinfer-fa2")
    monkeypatch.setattr(backends, "load_module", lambda path: module_of())
    found = load_backends(spec_of("cuda"), [tmp_path])
    assert sorted(found) == ["fa4", "fa4-64x128-early", "flashinfer-fa2", "flashinfer-fa3", "sdpa"]
    assert all(backend.name == name for name, backend in found.items())


class ScriptedChained:
    """Stands for ChainedKernels. answer: what a launch does."""

    answer: Callable[..., None] = right

    def __init__(self, library: object, *, causal: bool, paired: bool) -> None:
        assert (library, causal, paired) == ("cubin", False, True)

    def launch(self, qkv: Sequence[torch.Tensor], out: torch.Tensor, *_: object) -> None:
        type(self).answer(*qkv, out)


def broken(*_: object) -> None:
    raise RuntimeError("no such launch")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("answer", "warning"),
    [(right, None), (broken, "no such launch"), (lambda *_: None, "attention over one token is not")],
)
def test_chained_serves_where_it_is_built_and_right(
    answer: Callable[..., None],
    warning: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(backends, "_flat", lambda spec: {})  # seconds each, in the interpreter

    def library(*wanted: object) -> str:
        asked.append(wanted)
        return "cubin"

    monkeypatch.setattr(backends, "cuda_library", library)
    monkeypatch.setattr(backends, "ChainedKernels", ScriptedChained)
    monkeypatch.setattr(ScriptedChained, "answer", staticmethod(answer))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    found = load_backends(spec_of("cuda"), [tmp_path], compile_missing=False)
    assert asked == [(CHAINED_ATTENTION, (tmp_path,))]
    assert list(found) == (["sdpa"] if warning else ["chained", "sdpa"])
    assert (warning or "") in caplog.text
    assert ("cannot use chained" in caplog.text) is (warning is not None)


@pytest.mark.usefixtures("hopper")
def test_chained_does_not_serve_where_it_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_flat", lambda spec: {})
    monkeypatch.setattr(backends, "cuda_library", lambda *wanted: None)
    assert list(load_backends(spec_of("cuda"), [tmp_path], compile_missing=False)) == ["sdpa"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("head_dim", "tile_rows"), [(64, [64, 192, 128]), (128, [64, 128, 128]), (256, [64, 128]), (32, [])]
)
def test_the_lists_of_every_backend_are_compiled_ahead(
    head_dim: int, tile_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fa2, fa3 and chained, where they have such heads."""
    written: list[Fa2List | Fa3List] = []
    for kind in (Fa2List, Fa3List):
        monkeypatch.setattr(kind, "write", lambda made, *_: written.append(made))
    write_empty_lists(spec_of("cpu", head_dim))
    assert [type(made) for made in written] == [Fa2List, Fa3List, Fa3List][: len(tile_rows)]
    assert [made.tile_rows for made in written] == tile_rows


@pytest.mark.usefixtures("hopper")
def test_fp8_serves_models_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are not even told that it was not built."""
    monkeypatch.setattr(backends, "load_module", lambda path: module_of())
    monkeypatch.setattr(backends, "_flat", lambda spec: {})  # seconds each, in the interpreter
    bf16, fp8 = spec_of("cuda"), replace(spec_of("cuda"), fp8=True)
    fill(tmp_path, "fa4", "flashinfer-fa3-fp8")
    assert list(load_backends(bf16, [tmp_path])) == ["fa4", "sdpa"]
    assert list(load_backends(fp8, [tmp_path])) == ["fa4", "flashinfer-fa3-fp8", "sdpa"]
    fill(tmp_path, "fa4", "flashinfer-fa3-fp8", head_dim=64)
    assert "flashinfer-fa3-fp8" not in load_backends(replace(spec_of("cuda", 64), fp8=True), [tmp_path])
    fill(tmp_path, "fa4")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load_backends(bf16, [tmp_path])
        assert "fp8" not in caplog.text
        load_backends(fp8, [tmp_path])
    assert "flashinfer-fa2, flashinfer-fa3, flashinfer-fa3-fp8 (python -m rose.aot" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_a_window_leaves_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the folder have no windows, and none may be compiled that would ignore one."""
    fill(tmp_path, "fa4", "flashinfer-fa3")
    monkeypatch.setattr(backends, "load_module", lambda path: module_of())
    assert list(load_backends(replace(spec_of("cuda"), window=64), [tmp_path])) == ["sdpa"]


@pytest.mark.usefixtures("hopper")
def test_nothing_is_compiled_when_the_folder_has_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, "fa4")
    monkeypatch.setattr(backends, "load_module", lambda path: module_of())

    compiled: list[object] = []
    monkeypatch.setattr(fa4, "jit_kernel", lambda *arguments: compiled.append(arguments))
    monkeypatch.setattr(flashinfer, "jit_module", lambda *arguments: compiled.append(arguments))
    with caplog.at_level(logging.INFO):
        assert list(load_backends(spec_of("cuda"), [tmp_path])) == ["fa4", "sdpa"]
    assert "no kernel built for flashinfer-fa2, flashinfer-fa3" in caplog.text
    assert not compiled


@pytest.mark.usefixtures("hopper", "nothing_installed")
@pytest.mark.parametrize(
    "error", [ImportError("no tvm_ffi"), RuntimeError("undefined symbol"), AttributeError("func")]
)
def test_a_kernel_that_does_not_load_leaves_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    fill(tmp_path, "fa4")

    def broken(path: Path) -> object:
        raise error

    monkeypatch.setattr(backends, "load_module", broken)
    with caplog.at_level(logging.WARNING):
        assert list(load_backends(spec_of("cuda"), [tmp_path])) == ["sdpa"]
    assert f"cannot use {tmp_path / 'fa4.so'}" in caplog.text


@pytest.mark.usefixtures("hopper", "nothing_installed")
def test_a_kernel_that_answers_wrongly_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, "fa4", "flashinfer-fa2")
    monkeypatch.setattr(backends, "load_module", lambda path: module_of(lambda *_: None))
    with caplog.at_level(logging.WARNING):
        assert list(load_backends(spec_of("cuda"), [tmp_path])) == ["flashinfer-fa2", "sdpa"]
    assert "fa4.so: RuntimeError: attention over one token is not that token's value" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_without_kernels_an_installed_package_is_compiled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def module(spec: AttentionSpec, version: str) -> object:
        asked.append(version)
        return module_of()

    monkeypatch.setattr(fa4, "jit_kernel", no_module)
    monkeypatch.setattr(flashinfer, "jit_module", module)
    with caplog.at_level(logging.INFO):
        found = load_backends(spec_of("cuda"), [tmp_path])
    assert list(found) == ["flashinfer-fa3", "sdpa"]
    assert asked == ["fa3"]
    assert "flashinfer-fa3: compiled from the installed package" in caplog.text
    assert list(load_backends(spec_of("cuda"), [tmp_path], compile_missing=False)) == ["sdpa"]


@pytest.mark.usefixtures("hopper")
def test_a_compiler_that_fails_is_logged_and_the_next_one_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise ValueError("no nvcc")

    monkeypatch.setattr(fa4, "jit_kernel", lambda spec: right)
    monkeypatch.setattr(flashinfer, "jit_module", failing)
    assert list(load_backends(spec_of("cuda"), [tmp_path])) == ["fa4", "sdpa"]
    monkeypatch.setattr(fa4, "jit_kernel", failing)
    assert list(load_backends(spec_of("cuda"), [tmp_path])) == ["sdpa"]
    assert "fa4 could not be compiled: ValueError: no nvcc" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_fp32_is_left_to_torch_and_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(fa4, "jit_kernel", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(flashinfer, "jit_module", lambda *arguments: asked.append(arguments))
    fp32 = replace(spec_of("cuda"), dtype=torch.float32)
    assert list(load_backends(fp32, [tmp_path])) == ["sdpa"]
    assert not asked


@pytest.mark.usefixtures("hopper", "nothing_installed")
def test_head_dim_32_asks_flashinfer_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert list(load_backends(spec_of("cuda", head_dim=32), [tmp_path])) == ["sdpa"]
    assert "flashinfer" not in caplog.text


def test_importing_the_policy_imports_no_kernel_package() -> None:
    code = (
        "import sys, rose.attention.policy\n"
        "print([name for name in ('flashinfer', 'flash_attn', 'tvm_ffi') if name in sys.modules])"
    )
    assert output_of("-c", code).strip() == "[]"
