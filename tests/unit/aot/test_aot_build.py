"""The build command, as far as it goes without compilers: what it would build, and with which toolkit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose.aot import __main__ as command
from rose.aot import folders
from rose.aot.build_flashinfer import FA2_PRELUDE, stub_source
from rose.aot.manifest import read_manifest
from rose.aot.toolchain import ToolchainError, cuda_home, library_dir, run
from rose.aot.variants import DEFAULT_VARIANTS, KernelVariant, select
from tests.forbidden import forbid

# One instantiation as FlashInfer 0.7.2's templates render it.
GENERATED = """#include <flashinfer/attention/prefill.cuh>
namespace flashinfer {
constexpr auto use_custom_mask = %s == MaskMode::kCustom;
template cudaError_t BatchPrefillWithRaggedKVCacheDispatched<
    /*CTA_TILE_Q=*/16, 64, 64, PosEncodingMode::kNone, false, %s,
    DefaultAttention<use_custom_mask, false>, RaggedParams>(RaggedParams params, bool enable_pdl);
};  // namespace flashinfer
"""


def test_every_variant_has_a_file_of_its_own() -> None:
    files = [variant.file for variant in DEFAULT_VARIANTS]
    assert len(set(files)) == len(files)
    assert KernelVariant("fa4", 128, 2, True).file == "fa4-hd128-g2-causal-bf16-sm_90a.so"
    assert KernelVariant("flashinfer-fa3", 64).file == "flashinfer-fa3-hd64-bf16-sm_90a.so"
    assert KernelVariant("flashinfer-fa3-fp8", 128).file == "flashinfer-fa3-fp8-hd128-bf16-sm_90a.so"


def test_options_pick_kernels() -> None:
    assert select([], [], "sm_90a") == list(DEFAULT_VARIANTS)
    assert {v.kernel for v in select(["fa4"], [], "sm_90a")} == {"fa4", "fa4-64x128-early"}
    assert [v.file for v in select(["flashinfer-fa2"], [64], "sm_90a")] == [
        "flashinfer-fa2-hd64-bf16-sm_90a.so"
    ]
    assert [v.file for v in select(["flashinfer-fa3"], [128], "sm_90a")] == [
        "flashinfer-fa3-hd128-bf16-sm_90a.so"
    ]
    # Hopper code is not built for another GPU
    assert {v.kernel for v in select([], [], "sm_80")} == {"flashinfer-fa2"}
    assert {v.arch for v in select([], [], "sm_80")} == {"sm_80"}


def test_unused_kernels_become_stubs() -> None:
    masks = ("MaskMode::kCustom", "MaskMode::kMultiItemScoring")
    text = stub_source([GENERATED % (mask, mask) for mask in masks], FA2_PRELUDE)
    assert text.startswith(FA2_PRELUDE)
    assert text.count("template <> cudaError_t BatchPrefillWithRaggedKVCacheDispatched<") == 2
    assert text.count("{ return cudaErrorNotSupported; }") == 2
    assert "DefaultAttention<true, false>" in text
    assert "DefaultAttention<false, false>" in text
    assert "use_custom_mask" not in text


def test_a_changed_upstream_is_noticed() -> None:
    with pytest.raises(ToolchainError, match="unexpected FlashInfer sources"):
        stub_source(["int main() {}"], FA2_PRELUDE)


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_toolkit_is_where_nvcc_says_even_behind_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cuda-13.0"
    executable(home / "bin" / "nvcc", f"echo '#$ _HERE_={home}/bin' >&2")
    executable(tmp_path / "bin" / "nvcc", f'exec {home}/bin/nvcc "$@"')
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert cuda_home() == home
    with pytest.raises(ToolchainError, match=r"libcudart\.so"):
        library_dir(home)
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so").touch()
    assert library_dir(home) == home / "lib64"
    monkeypatch.setenv("CUDA_HOME", "/elsewhere")
    assert cuda_home() == Path("/elsewhere")


def test_without_nvcc_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="set CUDA_HOME"):
        cuda_home()


def test_a_failing_tool_shows_the_end_of_its_output(tmp_path: Path) -> None:
    tool = executable(tmp_path / "cc", "echo undefined reference; exit 3")
    with pytest.raises(ToolchainError, match="cc exited 3:\nundefined reference"):
        run([str(tool)])


def test_kernels_are_written_one_by_one_and_a_failure_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def builder(module: str, arguments: list[str], environment: dict[str, str]) -> None:
        if arguments[:4] == ["fa4", "128", "2", "1"]:
            raise ToolchainError("ptxas died")
        assert environment["CUTE_DSL_ARCH"] == "sm_90a"
        assert environment["FLASH_ATTENTION_ARCH"] == "sm_90"
        Path(arguments[-1]).write_bytes(" ".join(arguments[1:4]).encode())

    monkeypatch.setattr(command, "_run_builder", builder)
    monkeypatch.setattr(command, "version", lambda name: "1.0")
    monkeypatch.setattr(command, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(command, "cuda_version", lambda home: "13.0")
    out = tmp_path / "out"
    assert command.main(["--kernel", "fa4", "--out", str(out), "--work", str(tmp_path / "work")]) == 1
    records = read_manifest(out)
    expected = {v.file for v in DEFAULT_VARIANTS if v.family == "fa4"} - {
        "fa4-hd128-g2-causal-bf16-sm_90a.so"
    }
    assert {record.file for record in records} == expected
    assert {path.name for path in out.glob("*")} == {*expected, "manifest.json"}
    full = next(record for record in records if record.file == "fa4-hd128-g4-causal-bf16-sm_90a.so")
    assert (out / full.file).read_bytes() == b"128 4 1"
    assert (full.head_dim, full.group, full.causal, full.arch) == (128, 4, True, "sm_90a")
    assert full.versions["flash-attn-4"] == "1.0"
    assert full.versions["cuda"] == "13.0"
    assert "FAILED: ptxas died" in capsys.readouterr().err


def test_flashinfer_is_told_the_architecture_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def builder(module: str, arguments: list[str], environment: dict[str, str]) -> None:
        seen.update(environment, arguments=arguments)
        Path(arguments[2]).touch()

    monkeypatch.setattr(command, "_run_builder", builder)
    monkeypatch.setattr(command, "version", lambda name: "1.0")
    monkeypatch.setattr(command, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(command, "cuda_version", lambda home: "13.0")
    for arch, expected in (("sm_90a", "9.0a"), ("sm_80", "8.0"), ("sm_120f", "12.0f")):
        command.build_variant(KernelVariant("flashinfer-fa2", 64, arch=arch), tmp_path, tmp_path / "work", 3)
        assert seen["FLASHINFER_CUDA_ARCH_LIST"] == expected
    assert seen["arguments"][:2] == ["fa2", "64"]
    assert seen["arguments"][3] == "3"
    command.build_variant(KernelVariant("flashinfer-fa3-fp8", 128), tmp_path, tmp_path / "work", 3)
    assert seen["arguments"][:2] == ["fa3-fp8", "128"]


def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise command.PackageNotFoundError(name)

    monkeypatch.setattr(command, "version", missing)
    assert command.main(["--kernel", "fa4", "--head-dim", "32", "--out", str(tmp_path)]) == 1
    assert "flash-attn-4 is not installed; pip install '.[aot]'" in capsys.readouterr().err
    assert command.main(["--kernel", "fa4", "--head-dim", "7", "--out", str(tmp_path)]) == 2


def test_any_product_can_be_built_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "gemm-residual-64x96x128-cooperative-2x1-early"
    monkeypatch.setattr(
        command, "_run_builder", lambda module, arguments, environment: Path(arguments[-1]).touch()
    )
    monkeypatch.setattr(command, "version", lambda name: "1.0")
    monkeypatch.setattr(command, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(command, "cuda_version", lambda home: "13.0")
    assert command.main(["--product", name, "--out", str(tmp_path), "--work", str(tmp_path / "w")]) == 0
    assert [record.kernel for record in read_manifest(tmp_path)] == [name]
    refused = {
        "gemm-relu-64x64-cooperative-1x1": "names no product",
        "cuda-residual-160x128-1x2": "python -m rose.kernels.cuda.build builds",
    }
    for other, why in refused.items():
        with pytest.raises(SystemExit):
            command.main(["--product", other])
        assert why in capsys.readouterr().err


def test_where_kernels_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders.default_output() == repo_root / ".aot"
    assert folders.default_folders() == (repo_root / ".aot", tmp_path / "bouquet" / "aot")
    monkeypatch.setattr(folders, "checkout_folder", lambda: None)
    assert folders.default_folders() == (tmp_path / "bouquet" / "aot",)
    assert folders.default_output() == tmp_path / "bouquet" / "aot"


@pytest.mark.parametrize("out_of_reach", ["", "bouquet", "bouquet/aot"])
def test_a_folder_that_cannot_be_read_is_passed_over_and_said_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    repo_root: Path,
    caplog: pytest.LogCaptureFixture,
    out_of_reach: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "bouquet" / "aot"
    cache.mkdir(parents=True)
    forbid(monkeypatch, tmp_path / out_of_reach)
    for _ in range(2):
        assert folders.default_folders() == (repo_root / ".aot",)
    (line,) = caplog.messages
    assert str(cache) in line and "cannot be read" in line
    assert folders.places() == (repo_root / ".aot", cache)


def test_who_has_no_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, repo_root: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert not folders.user_cache().exists()
    assert folders.default_folders()[0] == repo_root / ".aot"


def test_the_manifest_is_plain_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command, "_run_builder", lambda module, arguments, environment: Path(arguments[-1]).touch()
    )
    monkeypatch.setattr(command, "version", lambda name: "1.0")
    monkeypatch.setattr(command, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(command, "cuda_version", lambda home: "13.0")
    command.main(
        ["--kernel", "fa4", "--head-dim", "32", "--out", str(tmp_path), "--work", str(tmp_path / "w")]
    )
    document = json.loads((tmp_path / "manifest.json").read_text())
    assert document["format"] == 1
    assert document["kernels"][0]["file"] == "fa4-hd32-g1-full-bf16-sm_90a.so"
