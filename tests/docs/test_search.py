"""docs/examples/search.py finds what is there, and draws it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess
from tests.programs import output_of

SCRIPT = "docs/examples/search.py"
PNG = b"\x89PNG\r\n\x1a\n"
# All of docs/ is embedded, 20 s of both of two cores; others may have them most of the time.
LIMIT_S = 400.0
pytestmark = pytest.mark.timeout(LIMIT_S + 20.0)


def test_a_question_finds_its_page_and_a_map_is_drawn(minilm: ServerProcess, tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    question = "are pickle files of a model executed?"
    flags = ("--url", minilm.url, "--top", "2", "--map", picture)
    printed = output_of(SCRIPT, question, *flags, timeout_s=LIMIT_S)
    found = re.findall(r"^(0\.\d{3})  (\S+), (.*)$", printed, re.MULTILINE)
    assert {page for _, page, _ in found} == {"security.md"}
    scores = [float(score) for score, _, _ in found]
    assert len(scores) == 2 and scores[0] >= scores[1] > 0.3
    drawn = picture.read_bytes()
    assert drawn.startswith(PNG) and 20_000 < len(drawn) < 150_000


def test_without_a_server_it_says_so_in_a_line(repo_root: Path) -> None:
    command = [sys.executable, SCRIPT, "anything", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: no server at http://127\.0\.0\.1:9: .*\n", done.stderr)


def test_the_committed_map_is_light(repo_root: Path) -> None:
    drawn = (repo_root / "docs" / "images" / "corpus-map.png").read_bytes()
    assert drawn.startswith(PNG) and len(drawn) < 150_000
