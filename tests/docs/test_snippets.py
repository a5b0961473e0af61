"""What the README says to send to a server is sent to one, as printed but for the port."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from tests.docs import pages
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.timeout(60)
HELLO = "Hello, world"
METRIC = re.compile(r"(?:ivy|tulip|rose)_\w+")


def embedded(minilm: ServerProcess, text: str) -> np.ndarray:
    """f32[384], asked for without any of the README's programs."""
    status, answer = minilm.post("/v1/embeddings", {"input": text})
    assert status == 200
    return np.array(answer["data"][0]["embedding"], np.float32)


def test_curl_gets_a_vector(minilm: ServerProcess) -> None:
    [command] = [words for words in pages.fenced_commands(pages.ROOT / "README.md") if words[0] == "curl"]
    here = [word.replace("http://127.0.0.1:8000", minilm.url) for word in command]
    assert here != command
    answer = json.loads(subprocess.run(here, capture_output=True, timeout=30, check=True).stdout)
    assert answer["model"] == "minilm"
    np.testing.assert_allclose(answer["data"][0]["embedding"], embedded(minilm, HELLO), atol=1e-6)


def test_every_python_program_runs(minilm: ServerProcess, repo_root: Path) -> None:
    openai, msgpack = pages.blocks(repo_root / "README.md", "python")
    texts = ["a red rose", "a white lily"]
    wanted = [embedded(minilm, text) for text in texts]
    rows = [item.embedding for item in run(openai, minilm)["answer"].data]
    np.testing.assert_allclose(rows, wanted, atol=1e-5)
    np.testing.assert_allclose(run(msgpack, minilm)["embed"](texts), wanted, atol=1e-5)


def test_metrics_that_tuning_looks_at_are_exported(minilm: ServerProcess, repo_root: Path) -> None:
    named = [span for span in pages.spans(repo_root / "docs" / "tuning.md") if METRIC.fullmatch(span)]
    with urlopen(f"{minilm.url}/metrics", timeout=10) as answer:
        exported = set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))
    assert len(named) > 6
    assert set(named) <= exported


def run(program: str, minilm: ServerProcess) -> dict[str, Any]:
    """Its names, once it has ended."""
    here = program.replace("localhost:8000", minilm.url.removeprefix("http://"))
    assert here != program
    names: dict[str, Any] = {}
    exec(here, names)
    return names
