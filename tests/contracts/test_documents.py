"""What the README and the build say is what the project does."""

from __future__ import annotations

import re
from pathlib import Path

import server
from gateway.body_values import MAX_CONTAINERS, MAX_VALUES
from tests.docs.pages import blocks


def test_the_client_in_the_readme_is_the_one_that_the_api_tests_run(repo_root: Path) -> None:
    clients = [code for code in blocks(repo_root / "README.md", "python") if "msgpack" in code]
    assert clients
    assert clients == blocks(repo_root / "docs" / "api.md", "python")
    assert sum(bool(line.strip()) for line in clients[0].splitlines()) <= 20


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
