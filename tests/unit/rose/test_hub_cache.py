"""A cached copy that may be a part of its repository is refused: without modules.json vectors are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from rose import hub as hub_module
from rose.errors import ModelLoadError
from rose.model_source import PRESETS
from tests.unit.rose.loopback_hub import COMMIT, Hub, hub_of, resolve_beside

OFFLINE = {"HF_HUB_OFFLINE": "1"}
OLDER = "f" * 40
FILES = (
    "1_Pooling/config.json",
    "config.json",
    "modules.json",
    "pytorch_model.bin",
    "sparse_linear.pt",
    "tokenizer.json",
)
BARE = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_of(FILES) as hub:
        yield hub


def copy_of(cache: Path, repo: str, *files: str, absent: tuple[str, ...] = ()) -> Path:
    """A copy in the hub's cache, as tools make it that fetch file by file: no listing is kept.

    absent: files that were asked for and that the hub does not have.
    """
    root = cache / "hub" / f"models--{repo.replace('/', '--')}"
    for path in [root / "snapshots" / COMMIT / file for file in files]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for path in [root / ".no_exist" / COMMIT / file for file in absent]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    return root / "snapshots" / COMMIT


def settings(alias: str) -> list[str]:
    return [file.relative_to(PRESETS / alias).as_posix() for file in (PRESETS / alias).rglob("*.json")]


@pytest.mark.parametrize("missing", ["modules.json", "pytorch_model.bin", "sparse_linear.pt"])
@pytest.mark.parametrize("status", [501, None])  # after 503 the client waits and tries again, for 23 s
def test_a_first_start_without_one_of_the_files_is_refused(
    hub: Hub, tmp_path: Path, missing: str, status: int | None
) -> None:
    hub.broken[missing] = status
    for env in ({}, OFFLINE):
        out, errors = resolve_beside(hub.url, tmp_path, "org/name", "auto", **env)
        assert out == ""
        told = errors.splitlines()[-1]
        assert told.startswith("cannot reach the hub for org/name (")
        # Others under way may be lost with it.
        assert f"{COMMIT} is not known to be whole: it has no " in told
        assert status is None or missing in told or " more; start once" in told
        assert "--model" not in told
        assert status is None or env or "501" in told

    hub.broken.clear()
    out, errors = resolve_beside(hub.url, tmp_path, "org/name", "auto")
    assert COMMIT in out, errors


def test_a_bare_model_that_was_downloaded_here_is_served_without_a_network(tmp_path: Path) -> None:
    with hub_of(BARE) as hub:
        out, errors = resolve_beside(hub.url, tmp_path, "org/name", "auto")
        assert COMMIT in out, errors
        assert resolve_beside(hub.url, tmp_path, "org/name", "auto", **OFFLINE)[0] == out


def test_weights_that_a_gateway_left_out_are_missed_without_a_network(hub: Hub, tmp_path: Path) -> None:
    out, errors = resolve_beside(hub.url, tmp_path, "org/name", "dummy")
    assert COMMIT in out, errors
    assert resolve_beside(hub.url, tmp_path, "org/name", "dummy", **OFFLINE)[0] == out
    out, errors = resolve_beside(hub.url, tmp_path, "org/name", "auto", **OFFLINE)
    assert out == ""
    assert "it has no pytorch_model.bin and 1 more; start once" in errors


def test_a_copy_of_an_alias_without_its_modules_is_refused(hub: Hub, tmp_path: Path) -> None:
    copy_of(tmp_path, "BAAI/bge-base-en-v1.5", *BARE)
    for name in ("bge-base", "BAAI/bge-base-en-v1.5"):
        out, errors = resolve_beside(hub.url, tmp_path, name, "auto", **OFFLINE)
        assert out == ""
        assert "it has no 1_Pooling/config.json and 2 more; start once with the hub in reach" in errors
        assert "--model" not in errors


@pytest.mark.parametrize("alias", ["bge-base", "bge-reranker"])
def test_a_copy_of_an_alias_with_all_its_settings_is_served(hub: Hub, tmp_path: Path, alias: str) -> None:
    repo = {"bge-base": "BAAI/bge-base-en-v1.5", "bge-reranker": "BAAI/bge-reranker-v2-m3"}[alias]
    folder = copy_of(tmp_path, repo, *BARE, *settings(alias))
    out, errors = resolve_beside(hub.url, tmp_path, alias, "auto", **OFFLINE)
    assert out.startswith(str(folder)), errors


def test_a_setting_that_the_hub_is_known_not_to_have_is_not_missed(hub: Hub, tmp_path: Path) -> None:
    absent = "sentence_bert_config.json"
    files = {*BARE, *settings("bge-base")} - {absent}
    folder = copy_of(tmp_path, "BAAI/bge-base-en-v1.5", *files, absent=(absent,))
    out, errors = resolve_beside(hub.url, tmp_path, "bge-base", "auto", **OFFLINE)
    assert out.startswith(str(folder)), errors


def test_a_copy_that_may_lack_modules_is_refused_with_a_way_out(hub: Hub, tmp_path: Path) -> None:
    folder = copy_of(tmp_path, "org/name", *BARE)
    out, errors = resolve_beside(hub.url, tmp_path, "org/name", "auto", **OFFLINE)
    assert out == ""
    assert errors.count("\n") == 0
    assert f"the cached copy {folder} is not known to be whole: it has no modules.json; start once" in errors
    assert errors.endswith("if the hub has none either, give --model that folder")
    assert resolve_beside(hub.url, tmp_path, str(folder), "auto", **OFFLINE)[0].startswith(str(folder))


def test_a_copy_with_modules_or_a_mark_that_there_are_none_is_served(hub: Hub, tmp_path: Path) -> None:
    with_modules = copy_of(tmp_path / "a", "org/name", *BARE, "modules.json")
    marked = copy_of(tmp_path / "b", "org/name", *BARE, absent=("modules.json",))
    for cache, folder in (("a", with_modules), ("b", marked)):
        out, errors = resolve_beside(hub.url, tmp_path / cache, "org/name", "auto", **OFFLINE)
        assert out.startswith(str(folder)), errors


@pytest.mark.parametrize("raises", [False, True])
def test_what_was_listed_is_looked_for_whatever_the_client_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    folder = copy_of(tmp_path, "org/name", "config.json")

    def snapshot(*_: object, local_files_only: bool = False, **__: object) -> str:
        if raises and not local_files_only:
            raise LocalEntryNotFoundError("no answer")
        return str(folder)

    monkeypatch.setattr(hub_module, "_listing", lambda *_: hub_module._Listing(COMMIT, [*FILES]))
    monkeypatch.setattr(hub_module, "snapshot_download", snapshot)
    with pytest.raises(ModelLoadError, match=r"it has no 1_Pooling/config\.json and 4 more"):
        hub_module.download("org/name", None, "auto")


@pytest.mark.parametrize("kept", [["config.json"], ["config.json", "modules.json"], None])
def test_an_older_commit_is_held_to_its_own_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: list[str] | None
) -> None:
    """The client falls back on it by itself if the hub fails between two questions."""
    older = tmp_path / OLDER
    older.mkdir()
    (older / "config.json").touch()
    monkeypatch.setattr(hub_module, "_listing", lambda *_: hub_module._Listing(COMMIT, [*FILES]))
    monkeypatch.setattr(hub_module, "_cached_listing", lambda *_: kept)
    monkeypatch.setattr(hub_module, "snapshot_download", lambda *_, **__: str(older))
    if kept == ["config.json"]:
        assert hub_module.download("org/name", None, "auto") == (older, OLDER)
        assert "using the cached copy of org/name" in caplog.text
    else:
        with pytest.raises(ModelLoadError, match=r"it has no modules\.json"):
            hub_module.download("org/name", None, "auto")
