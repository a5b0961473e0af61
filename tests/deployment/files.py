"""What lies in docs/deployment, read: YAML, instructions of Dockerfiles, the unit, and all command lines."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "deployment"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
COMPOSE = "docker-compose.yml"
COMPOSES = (COMPOSE, "docker-compose.cuda.yml")
MANIFESTS = ("gateway.yaml", "cpu.yaml", "gpu.yaml")
UNIT = "systemd/bouquet.service"

# `${NAME}`, and of Compose `${NAME:-default}`.
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def documents(name: str) -> list[Any]:
    """All of a file's, of which the caller may do as it likes."""
    return deepcopy(_documents(name))


@cache
def _documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def manifest(name: str, kind: str) -> dict[str, Any]:
    """The one of this kind in a file for Kubernetes."""
    [found] = [document for document in documents(f"kubernetes/{name}") if document["kind"] == kind]
    return found


def pod(name: str) -> dict[str, Any]:
    """What a file's Deployment makes."""
    spec: dict[str, Any] = manifest(name, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    """The only one of that pod."""
    [found] = pod(name)["containers"]
    return found


@cache
def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Name and value of each; continued lines are joined."""
    parser = DockerfileParser(fileobj=BytesIO((FOLDER / dockerfile).read_bytes()))
    found = [(step["instruction"], step["value"]) for step in parser.structure]
    return [(name, value) for name, value in found if name != "COMMENT"]


def last_stage(dockerfile: str) -> list[tuple[str, str]]:
    """What makes the image itself."""
    steps = instructions(dockerfile)
    start = max(index for index, (name, _) in enumerate(steps) if name == "FROM")
    return steps[start:]


def last(dockerfile: str, name: str) -> str:
    """The value that holds."""
    return [value for key, value in last_stage(dockerfile) if key == name][-1]


def entrypoint(dockerfile: str) -> list[str]:
    """Without `python server.py`: flags that every container has."""
    words: list[str] = json.loads(last(dockerfile, "ENTRYPOINT"))
    assert words[:2] == ["python", "server.py"]
    return words[2:]


def value_of(flags: list[str], flag: str) -> str:
    """What comes after it, or behind its `=`."""
    joined = [word.partition("=")[2] for word in flags if word.startswith(f"{flag}=")]
    return joined[-1] if joined else flags[flags.index(flag) + 1]


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """As Compose and systemd do it."""
    return _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2] or "", text)


def unit() -> configparser.ConfigParser:
    """The unit's sections; of a key that is there twice the last."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((FOLDER / UNIT).read_text())
    return parser


def unit_environment(specifiers: Mapping[str, str]) -> dict[str, str]:
    """What it sets, with `%C` and the like as given."""
    text = unit()["Service"]["Environment"]
    for specifier, meaning in specifiers.items():
        text = text.replace(specifier, meaning)
    return dict(word.split("=", 1) for word in text.split())


def unit_command(variables: Mapping[str, str]) -> list[str]:
    """ExecStart, word by word."""
    return [interpolated(word, variables) for word in unit()["Service"]["ExecStart"].split()]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Every server's flags, by the file that has them."""
    for name in DOCKERFILES:
        yield name, entrypoint(name) + json.loads(last(name, "CMD"))
    for name, image in zip(COMPOSES, DOCKERFILES, strict=True):
        [document] = documents(name)
        words = document["services"]["server"]["command"]
        yield name, entrypoint(image) + [interpolated(word, {}) for word in words]
    for name in MANIFESTS:
        words = [
            word.replace("$(MODEL)", "minilm").replace("$(CPUS)", "4") for word in container(name)["args"]
        ]
        image = DOCKERFILES[container(name)["image"].endswith("-cuda")]
        yield name, entrypoint(image) + words
    yield UNIT, unit_command(unit_environment({}))[2:]
