"""The worked example of docs/adding-a-model.md, run as it stands: its files, its registrations, its test."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import GteConfig, GteModel

from tests.unit.rose.parity import assert_same, resized, save_oracle

BLOCK = re.compile(r"^```python\n# (in )?(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TABLES = {
    "rose/config.py": "_CLASSES",
    "rose/models/registry.py": "_MODELS",
    "rose/reference/__init__.py": "_FORWARDS",
}


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "adding-a-model.md").read_text()


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture
def example(page: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's new files as modules and its lines in the tables of others; the code of its test."""
    test = ""
    for is_part, path, code in BLOCK.findall(page):
        name = module_name(path)
        if not is_part:
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(code, path, "exec"), vars(module))
        elif path in TABLES:
            module = importlib.import_module(name)
            table = TABLES[path]
            monkeypatch.setattr(module, table, dict(getattr(module, table)))
            exec(code, {**vars(module), **imported(path)})
        else:
            test = code
    return test


def imported(path: str) -> dict[str, object]:
    """What the lines of `path` would import: the reader's module, or the reference's function."""
    if path == "rose/config.py":
        return {"gte": sys.modules["rose.configs.gte"]}
    if path == "rose/reference/__init__.py":
        return {"gte": vars(sys.modules["rose.reference.gte"])["gte"]}
    return {}


def test_the_example_gives_what_transformers_gives(example: str, tmp_path: Path) -> None:
    names: dict[str, object] = {
        "GteConfig": GteConfig,
        "GteModel": GteModel,
        "Path": Path,
        "assert_same": assert_same,
        "resized": resized,
        "save_oracle": save_oracle,
    }
    exec(example, names)
    test = names["test_gte"]
    assert callable(test)
    test(tmp_path)


def test_its_wiring_is_as_short_as_the_page_says(page: str) -> None:
    wiring = next(code for _, path, code in BLOCK.findall(page) if path == "rose/models/gte.py")
    assert wiring.count("\n") <= 100


def test_every_name_of_the_project_that_the_page_mentions_is_there(page: str, repo_root: Path) -> None:
    new = {"rose/configs/gte.py", "rose/models/gte.py", "rose/reference/gte.py"}
    paths = set(re.findall(r"(?:rose|tests|docs)/[\w/.-]+", page)) - new
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (repo_root / path.rstrip("./")).exists()] == []
