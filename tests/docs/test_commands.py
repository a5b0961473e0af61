"""Commands, targets and flags that the documents print are those that there are."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import loadgen.flags
import server
from tests.docs import pages

PRINTED = [(pages.name(page), words) for page in pages.PAGES for words in pages.fenced_commands(page)]
SPOKEN = [(pages.name(page), words) for page in pages.PAGES for words in pages.spoken_commands(page)]
ROOMS = ("server.py", "gateway", "rose", "scheduler")
PROGRAMS = (*ROOMS, "loadgen", "docs", "tests/browser", "tests/e2e")
OF_SERVER = pages.flags_in(server.build_parser().format_help())
# Of pip, Docker and systemd.
OF_OTHERS = {"--extra-index-url", "--build", "--build-arg", "--install", "--now", "--read-only"}
OF_OTHERS |= {"--rm", "--gpus", "--stop-timeout", "--tmpfs"}


def cases(commands: list[tuple[str, list[str]]], *programs: str) -> pytest.MarkDecorator:
    """A test for each of these commands: its words, without the program's name."""
    chosen = {f"{page}: {' '.join(words)}": words[1:] for page, words in commands if words[0] in programs}
    assert chosen
    return pytest.mark.parametrize("words", chosen.values(), ids=chosen)


@cache
def flags_of(*programs: str) -> frozenset[str]:
    """Every "--flag" in the source of files, or of all below folders."""
    return frozenset(
        flag
        for path in sources(programs)
        for flag in re.findall(r'"(--[a-z][a-z0-9-]*)"', path.read_text(encoding="utf-8"))
    )


def sources(programs: tuple[str, ...]) -> Iterator[Path]:
    for program in programs:
        path = pages.ROOT / program
        yield from path.rglob("*.py") if path.is_dir() else [path]


@cases(PRINTED, "python")
def test_a_printed_command_is_taken_by_its_parser(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replicas.txt").write_text("http://10.0.0.7:8000\n")
    monkeypatch.chdir(tmp_path)
    if words[:2] == ["server.py", "corpus"]:
        assert server.corpus_parser().parse_args(words[2:])
    elif words[:2] == ["server.py", "verify"]:
        assert server.verify_parser().parse_args(words[2:])
    elif words[0] == "server.py":
        assert server.parse_options(words[1:])
    elif words[:2] == ["-m", "loadgen"]:
        assert loadgen.flags.parser().parse_args(words[2:])
    else:
        program = words[1].replace(".", "/") if words[0] == "-m" else words[0]
        assert program.startswith(("docs/", "tests/browser/"))  # the next test looks at it


def named(words: str) -> set[str]:
    """The flags among them."""
    return {word.strip("[]") for word in words.split() if re.match(r"\[?--", word)}


@cases([*PRINTED, *SPOKEN], "python", "python3")
def test_programs_files_and_flags_exist(words: list[str]) -> None:
    for word in words:
        assert not word.startswith(("tests/", "docs/")) or (pages.ROOT / word).exists()
    if words[:2] == ["-m", "pytest"]:
        return
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec and spec.origin
        program = pages.name(Path(spec.origin))
    else:
        program = words[0]
    assert (pages.ROOT / program).is_file()
    top = program.split("/")[0]
    own, _, of_server = " ".join(words).partition(" -- ")
    flags = flags_of(*ROOMS) | OF_SERVER
    assert named(of_server) <= flags
    assert named(own) <= (flags if top == "server.py" else flags_of(top))


@cases([*PRINTED, *SPOKEN], "make")
def test_targets_and_variables_of_make_exist(words: list[str]) -> None:
    makefile = (pages.ROOT / "Makefile").read_text()
    rest = words[2:] if words[0] == "-C" else words
    for word in rest:
        variable, given, _ = word.partition("=")
        rule = rf"^{re.escape(variable)} \?=" if given else rf"^{re.escape(word)}:"
        assert re.search(rule, makefile, re.MULTILINE), word


@cases([*PRINTED, *SPOKEN], "pip")
def test_extras_of_the_package_exist(words: list[str]) -> None:
    extras = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [extra] = re.findall(r"(?:\.|bouquet)\[(\w+)\]", words[-1])
    assert extra in extras


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_flags_that_are_spoken_of_exist(page: Path) -> None:
    assert pages.flags(page) <= flags_of(*PROGRAMS) | OF_SERVER | OF_OTHERS


def test_tuning_is_by_flags_of_the_server(repo_root: Path) -> None:
    named = pages.flags(repo_root / "docs" / "tuning.md") - {"--url"}  # of loadgen
    assert len(named) > 12
    assert named <= OF_SERVER
