"""What the README and the build say is what the project does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import server
from gateway.body_values import MAX_CONTAINERS, MAX_VALUES

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def readme(repo_root: Path) -> str:
    return (repo_root / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return [code for tag, code in BLOCK.findall(text) if tag == language]


def test_the_client_in_the_readme_is_the_one_that_the_api_tests_run(repo_root: Path, readme: str) -> None:
    clients = [code for code in blocks(readme, "python") if "msgpack" in code]
    assert clients
    assert clients == blocks((repo_root / "docs" / "api.md").read_text(), "python")
    assert sum(bool(line.strip()) for line in clients[0].splitlines()) <= 20


def test_the_commands_in_the_readme_parse(readme: str) -> None:
    commands = [
        shlex.split(line, comments=True)
        for code in blocks(readme, "")
        for line in code.splitlines()
        if line.startswith("python server.py")
    ]
    assert len(commands) >= 4
    for command in commands:
        assert server.parse_options(command[2:])


def test_the_targets_in_the_readme_exist(repo_root: Path, readme: str) -> None:
    targets = set(re.findall(r"\bmake ([a-z-]+)", readme))
    assert targets >= {"serve", "test", "test-long", "aot"}
    rules = set(re.findall(r"^([a-z-]+):", (repo_root / "Makefile").read_text(), re.MULTILINE))
    assert targets <= rules


def test_figures_in_the_documents_are_the_defaults(repo_root: Path) -> None:
    given = server.parse_options([])
    options = given.gateway
    life = (repo_root / "docs" / "architecture.md").read_text()
    assert f"up to {options.inline_text_chars} characters on the loop" in life
    api = (repo_root / "docs" / "api.md").read_text()
    limits = api.partition("## Limits")[2].partition("## ")[0]
    rows = [line.split("|")[2] for line in limits.splitlines() if line.startswith("| ")]
    figures = [int(re.sub(r"\D", "", row.split(",")[0])) for row in rows if re.search(r"\d", row)]
    assert figures == [
        options.max_items,
        options.max_request_tokens,
        options.max_body_bytes // 2**20,
        MAX_CONTAINERS,
        MAX_VALUES,
        options.head_timeout_s,
        options.body_timeout_s,
        options.keepalive_timeout_s,
        options.max_outstanding_requests,
        given.engine.max_token_bytes // 2**20,
        options.max_outstanding_token_bytes // 2**20,
        given.scheduler.step_timeout_s,
        options.request_timeout_s,
    ]


def test_files_that_the_documents_name_exist(repo_root: Path) -> None:
    text = (repo_root / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:rose|gateway|scheduler|cuda_utils)/[\w./]+)`", text))
    assert len(named) > 8
    assert [name for name in sorted(named) if not (repo_root / name).exists()] == []
    scripts = set(re.findall(r"`(\w+\.py)`", (repo_root / "docs" / "benchmarks" / "README.md").read_text()))
    assert len(scripts) > 4
    assert scripts <= {path.name for path in (repo_root / "docs" / "benchmarks").glob("*.py")}
