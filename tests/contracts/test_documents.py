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


def test_other_pages_have_the_figures_of_the_h200(repo_root: Path) -> None:
    pages = {name: (repo_root / "docs" / name).read_text() for name in ("tuning.md", "models.md")}
    tuning, models = (" ".join(page.split()) for page in pages.values())
    measured = (repo_root / "docs" / "benchmarks" / "h200.md").read_text()
    held = measured.partition("Held at the power limit")[2].partition("; BGE-M3")[0]
    ms = dict(re.findall(r"(\d+×\d+) ([\d.]+)", held))
    assert f"16 × 512 tokens of pplx-embed takes {ms['16×512']} ms" in tuning
    assert f"one of 4096 tokens takes {ms['1×4096']} ms, 16 of 512, " in tuning
    assert f"twice as many tokens, {ms['16×512']}." in tuning
    half, most, full = re.findall(r"BGE-M3 \(\d+/s\) (\S+ / \S+), (\S+ / \S+) and (\S+ / \d+)", measured)[0]
    assert f"{half} at half of the maximum, {most} at 80 %, {full} at 100 %" in tuning
    fp8, fp8_long = re.findall(r"100×512 takes ([\d.]+) ms.*?1×4096 ([\d.]+) \(", measured, re.DOTALL)[0]
    assert f"100 × 512 tokens of pplx-embed from {ms['100×512']} to {fp8} ms" in tuning
    assert f"{float(fp8) / float(ms['100×512']):.2f} of bfloat16's time at 100x512 ({fp8} ms)" in models
    assert f"{float(fp8_long) / float(ms['1×4096']):.2f} at 1x4096 ({fp8_long} ms;" in models


def test_files_that_the_documents_name_exist(repo_root: Path) -> None:
    text = (repo_root / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:rose|gateway|scheduler|cuda_utils)/[\w./]+)`", text))
    assert len(named) > 8
    assert [name for name in sorted(named) if not (repo_root / name).exists()] == []
    scripts = set(re.findall(r"`(\w+\.py)`", (repo_root / "docs" / "benchmarks" / "README.md").read_text()))
    assert len(scripts) > 4
    assert scripts <= {path.name for path in (repo_root / "docs" / "benchmarks").glob("*.py")}
