"""Downloads from a hub on loopback: only what serving needs, at one commit; from the cache when offline."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import LocalEntryNotFoundError

from rose import hub as hub_module
from rose.errors import ModelLoadError
from rose.hub import wanted_files
from tests.unit.rose.loopback_hub import CLOSED_PORT, COMMIT, Hub, hub_of, resolve_beside, run_beside

FILES = (
    "1_Pooling/config.json",
    "README.md",
    "config.json",
    "model.safetensors",
    "modules.json",
    "onnx/model.onnx",
    "onnx/tokenizer.json",
    "openvino/model.safetensors",
    "pytorch_model.bin",
    "tf_model.h5",
    "tokenizer.json",
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_of(FILES) as hub:
        yield hub


def test_only_what_serving_needs_is_downloaded_and_then_kept(hub: Hub, tmp_path: Path) -> None:
    out, errors = resolve_beside(hub.url, tmp_path, "org/name", "auto")
    folder, revision, origin = out.split(" ", 2)
    assert (revision, origin) == (COMMIT, "hub org/name"), errors
    assert sorted(hub.requested) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
    ]
    assert (Path(folder) / "1_Pooling" / "config.json").read_text() == "{}"

    again, _ = resolve_beside(hub.url, tmp_path, "org/name", "auto", HF_HUB_OFFLINE="1")
    assert again.startswith(f"{folder} {COMMIT}")


def test_dummy_weights_need_no_download_of_weights(hub: Hub, tmp_path: Path) -> None:
    out, errors = resolve_beside(hub.url, tmp_path, "org/name@main", "dummy")
    assert COMMIT in out, errors
    assert not any("model.safetensors" in file for file in hub.requested)
    assert "config.json" in hub.requested


@pytest.mark.parametrize(
    ("flags", "downloads"),
    [("--no-engine --replica http://a", False), ("--replica http://a", True), ("", True)],
)
def test_a_gateway_without_an_engine_downloads_no_weights(
    hub: Hub, tmp_path: Path, flags: str, downloads: bool
) -> None:
    code = "import sys, server; print(server.model_of(server.parse_options(sys.argv[1:])).find().origin)"
    out, errors = run_beside(hub.url, tmp_path, code, "--model", "org/name", *flags.split())
    assert out == "hub org/name", errors
    assert ("model.safetensors" in hub.requested) is downloads
    assert {"config.json", "tokenizer.json"} <= {*hub.requested}


def test_a_repository_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    out, errors = resolve_beside(hub.url, tmp_path, "org/other", "auto")
    assert out == ""
    assert errors == "the hub shows no model org/other; if it is private, set HF_TOKEN"


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_the_message_names_every_way_out(tmp_path: Path, offline: str) -> None:
    out, errors = resolve_beside(CLOSED_PORT, tmp_path, "bge-m3", "auto", HF_HUB_OFFLINE=offline)
    assert out == ""
    assert errors.count("\n") == 0
    for way in ("cannot reach the hub for BAAI/bge-m3", "folder", "--model minilm", "--load-format dummy"):
        assert way in errors


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_cache_that_cannot_be_written_is_named_and_no_older_commit_served(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            return str(tmp_path / "older")
        raise OSError(number, os.strerror(number), "/cache/blobs")

    monkeypatch.setattr(hub_module, "_listing", lambda *_: hub_module._Listing(COMMIT, ["config.json"]))
    monkeypatch.setattr(hub_module, "snapshot_download", snapshot)
    with pytest.raises(ModelLoadError) as caught:
        hub_module.download("org/name", None, "auto")
    for words in ("cannot download org/name into ", HF_HUB_CACHE, os.strerror(number), "HF_HUB_CACHE names"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_that_is_no_folder_is_not_taken_for_a_hub_that_is_away(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.touch()
    out, errors = resolve_beside(hub.url, cache, "org/name", "auto")
    assert out == ""
    assert errors.splitlines()[-1].startswith(f"cannot download org/name into {cache}/hub: ")


@pytest.mark.parametrize(
    ("error", "unreachable"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (socket.gaierror(), True),
        (LocalEntryNotFoundError(""), True),
        (PermissionError(), False),
        (FileNotFoundError(), False),
        (OSError(), False),
        (ValueError(), False),
    ],
)
def test_only_errors_of_the_connection_mean_a_hub_that_is_away(error: Exception, unreachable: bool) -> None:
    assert hub_module._means_unreachable(error) is unreachable


def test_one_form_of_the_weights_is_chosen() -> None:
    both = ["config.json", "model.safetensors", "pytorch_model.bin"]
    assert wanted_files(both, "auto") == ["config.json", "model.safetensors"]
    assert wanted_files(["config.json", "pytorch_model.bin"], "safetensors") == ["config.json"]
    shards = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert wanted_files([*shards, "original/model.safetensors"], "auto") == shards


@pytest.mark.parametrize(
    ("listed", "chosen"),
    [
        # As sentence-transformers 2 and the hub's conversion to safetensors left them.
        (("model.safetensors", "pytorch_model.bin", "2_Dense/pytorch_model.bin"), (0, 2)),
        (("pytorch_model.bin", "2_Dense/pytorch_model.bin", "2_Dense/model.safetensors"), (2, 0)),
        (("model.safetensors", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"), (0, 1)),
        (("pytorch_model.bin", "2_Dense/pytorch_model.bin"), (0, 1)),
    ],
)
def test_the_form_of_weights_is_chosen_by_folder(listed: tuple[str, ...], chosen: tuple[int, ...]) -> None:
    assert wanted_files([*listed], "auto") == [listed[i] for i in chosen]
    assert not any("pytorch_model" in file for file in wanted_files([*listed], "safetensors"))


def test_a_dense_module_that_is_pickled_is_downloaded_unless_pickles_are_refused(tmp_path: Path) -> None:
    files = ("config.json", "model.safetensors", "2_Dense/config.json", "2_Dense/pytorch_model.bin")
    with hub_of(files) as hub:
        out, errors = resolve_beside(hub.url, tmp_path / "a", "org/name", "auto")
        assert (Path(out.split()[0]) / "2_Dense" / "pytorch_model.bin").is_file(), errors

        hub.requested.clear()
        out, errors = resolve_beside(hub.url, tmp_path / "b", "org/name", "safetensors")
        wrong = "org/name has 2_Dense/pytorch_model.bin as a pickle only; --load-format auto takes it"
        assert (out, errors) == ("", wrong)
        assert hub.requested == []


def test_heads_over_tokens_come_with_the_weights() -> None:
    heads = ["sparse_linear.pt", "colbert_linear.pt"]
    listed = ["config.json", "pytorch_model.bin", "onnx/sparse_linear.pt", "optimizer.pt", *heads]
    assert wanted_files(listed, "auto") == ["config.json", "pytorch_model.bin", *heads]
    for load_format in ("dummy", "safetensors"):
        assert wanted_files(listed, load_format) == ["config.json"]
