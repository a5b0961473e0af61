"""docs/models.md lists the aliases as they are, and every class that is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rose.config import _CLASSES, load_config
from rose.model_aliases import ALIASES


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs" / "models.md").read_text()


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_every_alias_is_listed_as_it_is(page: str, repo_root: Path, alias) -> None:
    config = load_config(repo_root / "rose" / "presets" / alias.name)
    vector = "score" if config.task == "score" else str(config.dimensions)
    vector += " and int8" if config.quantizer else ""
    normalised = "yes" if config.normalize else "no"
    cells = (alias.name, alias.repo, vector, config.pooling, normalised, str(config.max_model_len))
    assert f"| {' | '.join(cells)} |" in page.splitlines()


def test_every_class_is_listed_by_name_or_by_its_ending(page: str) -> None:
    table = page[page.index("| classes in config.json") : page.index("## What follows")]
    listed = set(re.findall(r"\w*(?:Model|ForMaskedLM|ForCausalLM|ForSequenceClassification)\b", table))
    endings = set(re.findall(r"…(\w+)", table))
    missing = [name for name in _CLASSES if name not in listed and not name.endswith(tuple(endings))]
    assert missing == [] and endings
    assert {name for name in listed if name not in _CLASSES} <= endings
