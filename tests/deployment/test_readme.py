"""Commands in the README name files and flags that there are."""

from __future__ import annotations

import re
import shlex

import pytest

import server
from tests.deployment import files
from tests.docs.pages import blocks

TEXT = (files.FOLDER / "README.md").read_text()
COMMANDS = [
    shlex.split(line) for block in blocks(files.FOLDER / "README.md", "") for line in block.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(words[:3]) for words in COMMANDS])
def test_files_that_commands_name_exist(command: list[str]) -> None:
    named = [re.sub(r"^.*?(?=docs/)", "", word) for word in command if "docs/" in word]
    assert [path for path in named if not (files.ROOT / path).is_file()] == []


@pytest.mark.parametrize("command", [words for words in COMMANDS if words[:2] == ["docker", "run"]])
def test_the_image_takes_the_flags_behind_its_name(command: list[str]) -> None:
    [image] = [word for word in command if word.startswith("bouquet:") and not word.endswith("/cache")]
    assert f"bouquet:{server.VERSION}" == image.removesuffix("-cuda")
    dockerfile = files.DOCKERFILES[image.endswith("-cuda")]
    flags = files.entrypoint(dockerfile) + command[command.index(image) + 1 :]
    assert server.parse_options(flags).listen.host == "0.0.0.0"


def test_every_file_is_spoken_of() -> None:
    runnable = [*files.DOCKERFILES, *files.COMPOSES, *files.MANIFESTS, "prometheus-adapter.yaml"]
    for name in (*runnable, "bouquet.service", "cuda.conf", "alerts.yml", "bouquet.json"):
        assert name in TEXT


def test_figures_are_those_of_the_files() -> None:
    windows = [files.container(name)["startupProbe"] for name in ("cpu.yaml", "gpu.yaml")]
    minutes = [probe["periodSeconds"] * probe["failureThreshold"] // 60 for probe in windows]
    assert "in {} minutes (GPU: {})".format(*minutes) in TEXT
    assert f"`--drain-s`, {server.parse_options([]).drain_s:.0f} s" in TEXT
    metrics = files.manifest("cpu.yaml", "HorizontalPodAutoscaler")["spec"]["metrics"]
    waiting, busy = (metric[metric["type"].lower()]["target"]["averageValue"] for metric in metrics)
    assert f"({waiting} tokens for CPUs)" in TEXT
    assert f"more than {int(busy.removesuffix('m')) // 10} % of the time" in TEXT
